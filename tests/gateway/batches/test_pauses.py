"""Batches whose tenant or broker has no room: they pause, and may be cancelled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI
from openai.types import Batch

from shared.bus.bus import Bus
from shared.errors import DiskFull, QuotaExceeded
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.exceeded_shares import ExceededShare
from shared.protocol.full_stores import FullStore, FullStores
from shared.tenants.storage_quotas import publish_exceeded
from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl, results_of
from tests.gateway.conftest import Process
from tests.support.waiting import until
from workers.gateway.batches.slots import MIN_SLOTS
from workers.gateway.http.auth import digest

SECTIONS: dict[str, Any] = {
    "delivery": {"ack_wait_s": 1.5, "drain_s": 2.0},
    "gateway": {"port": 0, "api_keys": [{"name": "acme", "sha256": digest("acme")}]},
}
PUBLISH_S = 0.2


@pytest.fixture
async def client(rig: BatchRig) -> AsyncIterator[AsyncOpenAI]:
    url = f"{rig.gateway.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="acme", max_retries=0, timeout=60) as made:
        yield made


async def report_share(bus: Bus) -> None:
    await publish_exceeded(bus, [ExceededShare(subjects.BATCHES_STREAM, "acme", 2, 1)])


async def report_disk(bus: Bus) -> None:
    full = FullStores([FullStore("data", 1, 2)])
    await bus.publish_without_id(subjects.FULL_STORES, to_json(full))


@contextlib.asynccontextmanager
async def reported(bus: Bus, report: Callable[[Bus], Awaitable[None]]) -> AsyncIterator[None]:
    """Report that the store has no room, again and again during the body. A report expires."""

    async def keep_reporting() -> None:
        while True:
            await report(bus)
            await asyncio.sleep(PUBLISH_S)

    reporting = asyncio.create_task(keep_reporting())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        reporting.cancel()


async def begin_with_room(client: AsyncOpenAI, content: bytes) -> Batch:
    """Begin a batch as soon as the report of an earlier test has expired."""

    async def attempt() -> Batch | None:
        with contextlib.suppress(APIStatusError):
            return await begin(client, content)
        return None

    batch: Batch = await until(attempt)
    return batch


async def free_until_paused(client: AsyncOpenAI, rig: BatchRig, batch_id: str, code: str) -> None:
    """Answer one line after another until the batch pauses. A batcher reads reports each second."""
    log = rig.folder / "batcher.log"
    start = log.stat().st_size

    def is_paused() -> bool:
        return f'"reason": "{code}"' in log.read_text()[start:]

    async def is_written(num_lines: int) -> bool:
        counts = (await client.batches.retrieve(batch_id)).request_counts
        return is_paused() or (counts is not None and counts.completed >= num_lines)

    num_lines = 0
    while not is_paused():
        num_lines += 1
        rig.model.num_free += 1
        await until(partial(is_written, num_lines))


REPORTS = [
    (report_share, QuotaExceeded.code),
    pytest.param(report_disk, DiskFull.code, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("report", "code"), REPORTS)
async def test_a_batch_pauses_while_its_results_have_no_room(
    client: AsyncOpenAI,
    rig: BatchRig,
    batcher: Process,
    batch_bus: Bus,
    report: Callable[[Bus], Awaitable[None]],
    code: str,
) -> None:
    with rig.model.held_after(0):
        batch = await begin_with_room(client, jsonl([chat_line(number) for number in range(20)]))
        await until(lambda: rig.model.num_held == MIN_SLOTS)
        async with reported(batch_bus, report):
            await free_until_paused(client, rig, batch.id, code)
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    results = await results_of(client, batch.output_file_id)
    assert len(results) == 20
    # No line has begun in vain, and has needed another request.
    ids = [line["response"]["request_id"] for line in results.values()]
    assert all(request_id.endswith("-0") for request_id in ids), ids


@pytest.mark.parametrize(("report", "code"), REPORTS)
async def test_a_batch_without_room_is_cancelled_with_its_finished_lines(
    client: AsyncOpenAI,
    rig: BatchRig,
    batcher: Process,
    batch_bus: Bus,
    report: Callable[[Bus], Awaitable[None]],
    code: str,
) -> None:
    with rig.model.held_after(0):
        batch = await begin_with_room(client, jsonl([chat_line(number) for number in range(20)]))
        await until(lambda: rig.model.num_held == MIN_SLOTS)
        async with reported(batch_bus, report):
            await free_until_paused(client, rig, batch.id, code)
            await client.batches.cancel(batch.id)
            batch = await ended(client, batch.id, within_s=20.0)
    assert batch.status == "cancelled"
    assert len(await results_of(client, batch.output_file_id)) >= 1
    assert batch.error_file_id is None
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == [code]
