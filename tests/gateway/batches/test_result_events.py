"""Events with the results of a batch: each result once, also for a client that reconnects."""

import json
import secrets
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
from openai import AsyncOpenAI

from shared.batches.state import FinishedLine, checkpoint_after, results_of
from shared.bus.bus import Bus
from shared.protocol.batch_log import BatchBegun, Checkpoint, Validated
from shared.state import batch_log
from shared.state.batch_log import BatchLog
from tests.gateway.batches.conftest import CHAT, BatchRig, begin, chat_line, ended, jsonl
from tests.gateway.conftest import Process
from workers.gateway.backend.batches import result_events
from workers.gateway.core.result_positions import ResultPosition
from workers.gateway.http.auth import Caller

NUM_LINES = 60
RESULT_BYTES = 500_000
DONE = "[DONE]"


async def read_events(
    rig: BatchRig, batch_id: str, last_id: str, limit: int | None = None
) -> list[tuple[str, str]]:
    """Return the ids and the data of events after `last_id`: all of them, or the first ones."""
    headers = {"accept": "text/event-stream"} | ({"last-event-id": last_id} if last_id else {})
    events: list[tuple[str, str]] = []
    async with (
        httpx.AsyncClient(base_url=rig.gateway.url, timeout=60, trust_env=False) as http,
        http.stream("GET", f"/v1/batches/{batch_id}/results", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for event in parse(answer.aiter_lines()):
            events.append(event)
            if len(events) == limit:
                break
    return events


async def parse(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, str]]:
    event_id = ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield event_id, value


async def test_a_client_that_reconnects_reads_each_result_once(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process
) -> None:
    lines = [chat_line(n) for n in range(NUM_LINES - 1)] + [chat_line(NUM_LINES, temperature=-1)]
    with rig.model.held_after(20):
        batch = await begin(client, jsonl(lines))
        # The first results are read while the others cannot end.
        events = await read_events(rig, batch.id, "", 10)
    while events[-1][1] != DONE:
        # Each connection ends after some events, in the middle of a record as well.
        events += await read_events(rig, batch.id, events[-1][0], 7)
    results = [json.loads(data)["custom_id"] for _, data in events[:-1]]
    assert sorted(results) == sorted(line["custom_id"] for line in lines)
    ids = [event_id for event_id, _ in events[:-1]]
    assert len(set(ids)) == NUM_LINES

    # The pages of JSON lines continue at the same positions.
    await ended(client, batch.id)
    async with httpx.AsyncClient(base_url=rig.gateway.url, trust_env=False) as http:
        path = f"/v1/batches/{batch.id}/results"
        rest = await http.get(path, params={"after": ids[41]})
        assert [json.loads(line)["custom_id"] for line in rest.text.splitlines()] == results[42:]
        refusal = await http.get(path, headers={"last-event-id": "x"})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_stream_of_a_batch_that_has_ended_ends(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process
) -> None:
    batch = await begin(client, jsonl([chat_line(0)]))
    await ended(client, batch.id)
    events = await read_events(rig, batch.id, "")
    assert [data == DONE for _, data in events] == [False, True]


async def test_records_are_not_held_for_a_slow_reader(rig: BatchRig, batch_bus: Bus) -> None:
    while rig.batchers:  # A batcher would claim the batch.
        rig.kill_batcher()
    now_s = int(batch_bus.now_ms() / 1000)
    batch_id, end_s = f"batch_{secrets.token_hex(8)}", now_s + 3600
    order = BatchBegun(batch_id, "t", CHAT, "0" * 64, now_s, "1h", end_s, end_s)
    await batch_log.begin(batch_bus, order)
    log = await batch_log.open_batch(batch_bus, "t", batch_id)
    assert log is not None
    await log.append(Validated(0, 1, Checkpoint(num_lines=NUM_LINES, began_s=1)))
    await finish(log, 1)
    context: Any = SimpleNamespace(bus=batch_bus)
    events = result_events(context, Caller("", "t"), batch_id, ResultPosition())
    assert len(await anext(events)) > RESULT_BYTES
    tracemalloc.start()
    for line in range(2, NUM_LINES + 1):
        await finish(log, line)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 4 * RESULT_BYTES
    for _ in range(2, NUM_LINES + 1):
        assert len(await anext(events)) > RESULT_BYTES
    await events.aclose()  # type: ignore[attr-defined]


async def finish(log: BatchLog, line: int) -> None:
    result = FinishedLine(line, b'"%s"' % (b"x" * RESULT_BYTES))
    now = checkpoint_after(log.state.checkpoint, [result], lambda line: (line, 0))
    await log.append(results_of(log.next_index, 1, [result], now))
