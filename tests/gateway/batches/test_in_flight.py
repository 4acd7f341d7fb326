"""Lines in flight: twice as many as the live engines compute at once, divided among batchers."""

from functools import partial
from typing import Any

from openai import AsyncOpenAI

from ops.chaos.agents.scripted_model import MODEL
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl
from tests.gateway.conftest import Process
from tests.support.waiting import until
from workers.gateway.batches.slots import MIN_SLOTS

SEQUENCES = 12
SECTIONS: dict[str, Any] = {"engine": {"max_num_seqs": SEQUENCES}}


async def beat(bus: Bus, num_engines: int) -> None:
    for number in range(num_engines):
        name = f"engine-{number}"
        await bus.heartbeats.publish(
            name, to_json(Heartbeat("engine", name, "test", 0, [MODEL], {}))
        )


async def has_requests(bus: Bus, number: int, num_engines: int) -> bool:
    """Return whether this number of requests is in flight, with live engines."""
    await beat(bus, num_engines)
    return (await bus.figures.size(subjects.REQUESTS_STREAM))[0] == number


async def test_lines_in_flight_follow_the_live_engines(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    with rig.model.held_after(0):
        batch = await begin(client, jsonl([chat_line(n) for n in range(200)]))
        await until(partial(has_requests, batch_bus, MIN_SLOTS, 0))
        for num_engines in (1, 2):
            number = 2 * SEQUENCES * num_engines
            await until(partial(has_requests, batch_bus, number, num_engines))
    assert (await ended(client, batch.id)).status == "completed"
