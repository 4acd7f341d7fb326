"""Long batches: what a batcher reads at a takeover, and its memory for a million lines."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg
from openai import AsyncOpenAI

from shared.batches import state
from shared.batches.state import FinishedLine, checkpoint_after
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.batch_log import Claimed, Validated
from shared.state.batch_log import open_batch
from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl, results_of
from tests.support.waiting import until

SECTIONS: dict[str, Any] = {"batch": {"max_lines": 1_000_000, "max_file_mib": 512}}
SHORT, LONG = 100, 20_000
NUM_LEFT = 50
BLOCK = 1000
READS = f"$JS.API.DIRECT.GET.{subjects.BATCHES_STREAM}"
MANY = 1_000_000
NUM_RUN = 200
MAX_RSS_MIB = 150.0


async def begin_almost_done(client: AsyncOpenAI, bus: Bus, num_lines: int) -> str:
    """Begin a batch whose batcher has died when all lines but the last had results."""
    lines = [jsonl([chat_line(number)]) for number in range(num_lines)]
    offsets = [0, *itertools.accumulate(map(len, lines))]
    batch = await begin(client, b"".join(lines))
    log = await open_batch(bus, "", batch.id)
    assert log is not None
    await log.append(Claimed(log.next_index, 1, "dead", log.state.checkpoint))
    began = replace(log.state.checkpoint, num_lines=num_lines, began_s=1)
    await log.append(Validated(log.next_index, 1, began))
    for first in range(1, num_lines - NUM_LEFT + 1, BLOCK):
        numbers = range(first, min(first + BLOCK, num_lines - NUM_LEFT + 1))
        block = [
            FinishedLine(line, json.dumps({"custom_id": f"line-{line - 1}"}).encode())
            for line in numbers
        ]
        now = checkpoint_after(log.state.checkpoint, block, lambda line: (line, offsets[line - 1]))
        await log.append(state.results_of(log.next_index, 1, block, now))
    return batch.id


@pytest.mark.long
async def test_a_takeover_reads_as_much_of_a_long_batch_as_of_a_short_one(
    client: AsyncOpenAI, rig: BatchRig, batch_bus: Bus
) -> None:
    nc = batch_bus.connection.nc
    num_reads: dict[int, int] = {}
    for num_lines in (SHORT, LONG):
        batch_id = await begin_almost_done(client, batch_bus, num_lines)
        reads: list[str] = []

        async def note(message: Msg, reads: list[str] = reads) -> None:
            reads.append(message.data.decode())

        listening = await nc.subscribe(READS, cb=note)
        await nc.flush()
        rig.start_batcher()
        # The model's thread notes requests. A question to the gateway would be counted.
        await until(partial(has_begun, rig, batch_id))
        num_reads[num_lines] = len(reads)
        await listening.unsubscribe()
        batch = await ended(client, batch_id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == num_lines
        assert len(await results_of(client, batch.output_file_id)) == num_lines
        rig.kill_batcher()
    assert 0 < num_reads[LONG] <= num_reads[SHORT] + 2


def has_begun(rig: BatchRig, batch_id: str) -> bool:
    return any(name.startswith(batch_id) for name in list(rig.model.requests))


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_memory_does_not_grow_with_the_lines(client: AsyncOpenAI, rig: BatchRig) -> None:
    batcher = rig.start_batcher(forked=False)
    with rig.model.held_after(NUM_RUN):
        content = jsonl([chat_line(number) for number in range(MANY)])
        batch = await begin(client, content)
        del content
        await until(partial(has_results, client, batch.id), 900)
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch.id, within_s=900)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {
        "total": MANY,
        "completed": batch.request_counts.completed,
        "failed": MANY - batch.request_counts.completed,
    }
    assert peak_rss_mib(batcher.pid) < MAX_RSS_MIB


async def has_results(client: AsyncOpenAI, batch_id: str) -> bool:
    counts = (await client.batches.retrieve(batch_id)).request_counts
    return counts is not None and counts.completed >= NUM_RUN


def peak_rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if "VmHWM" in line)
