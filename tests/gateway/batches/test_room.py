"""Batches whose results have no room: they pause until there is some, or are cancelled."""

import secrets
from typing import Any

import pytest
from openai import AsyncOpenAI, InternalServerError

from shared.batches.state import faults_of
from shared.bus.bus import Bus
from shared.errors import Overloaded
from shared.state import batch_log
from shared.telemetry import cluster_snapshot
from tests.gateway.batches.conftest import (
    BatchRig,
    begin,
    chat_line,
    ended,
    jsonl,
    records_of,
    results_of,
)
from tests.gateway.conftest import Process
from tests.support.waiting import until
from workers.gateway.batches.slots import MIN_SLOTS

SECTIONS: dict[str, Any] = {"batch": {"store_mib": 1}}
FILLER_BYTES = 1_000_000
"""It leaves room for the input of the batch, and not for its results."""
NUM_LINES = 150
LARGEST, SMALLEST = 2**19, 2**6
"""Bytes of the files that fill the store."""


async def is_paused(bus: Bus) -> bool:
    series = cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
    paused = {item.labels["reason"]: item.value for item in series if item.name == "batches_paused"}
    return paused == {
        "disk_full": 0,
        "overloaded": 1,
        "storage_quota_exceeded": 0,
        "unavailable": 0,
    }


async def test_a_batch_without_room_pauses_until_there_is_some(
    client: AsyncOpenAI, rig: BatchRig, batch_bus: Bus
) -> None:
    filler = await client.files.create(file=("filler.jsonl", b" " * FILLER_BYTES), purpose="batch")
    with pytest.raises(InternalServerError) as refusal:
        await client.files.create(file=("more.jsonl", b"x" * FILLER_BYTES), purpose="batch")
    assert refusal.value.code == "overloaded"
    batch = await begin(client, jsonl([chat_line(number) for number in range(NUM_LINES)]))
    rig.start_batcher()
    await until(lambda: is_paused(batch_bus))
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    await client.files.delete(filler.id)
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    results = await results_of(client, batch.output_file_id)
    assert len(results) == NUM_LINES
    assert faults_of(await records_of(batch_bus, batch.id)) == []


async def fill_store(client: AsyncOpenAI) -> list[str]:
    """Upload files until the store has no room for a small one, and return their ids."""
    ids: list[str] = []
    num_bytes = LARGEST
    while num_bytes >= SMALLEST:
        content = secrets.token_bytes(num_bytes)
        try:
            file = await client.files.create(file=("filler.jsonl", content), purpose="batch")
            ids.append(file.id)
        except InternalServerError:
            num_bytes //= 2
    return ids


async def test_a_batch_is_cancelled_in_a_full_store(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    with rig.model.held_after(0):
        batch = await begin(client, jsonl([chat_line(number) for number in range(NUM_LINES)]))
        await until(lambda: rig.model.num_held == MIN_SLOTS)
        fillers = await fill_store(client)
    await until(lambda: is_paused(batch_bus))
    await client.batches.cancel(batch.id)
    batch = await ended(client, batch.id, within_s=20.0)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert batch.request_counts.total == NUM_LINES
    num_left = NUM_LINES - batch.request_counts.completed - batch.request_counts.failed
    assert num_left > 0
    assert batch.errors is not None
    (error,) = batch.errors.data or []
    assert error.code == "overloaded"
    assert f"{num_left} lines have no result" in (error.message or "")
    assert faults_of(await records_of(batch_bus, batch.id)) == []
    for file_id in fillers:
        await client.files.delete(file_id)


async def test_results_are_deleted_from_a_full_store(
    client: AsyncOpenAI, batcher: Process, batch_bus: Bus
) -> None:
    batch = await begin(client, jsonl([chat_line(number) for number in range(NUM_LINES)]))
    batch = await ended(client, batch.id)
    fillers = await fill_store(client)
    # The reserve is for batches that have begun.
    with pytest.raises(Overloaded):
        await cancel_unknown(batch_bus, 100)
    assert batch.output_file_id is not None
    assert (await client.files.delete(batch.output_file_id)).deleted
    content = jsonl([chat_line(number) for number in range(1)])
    assert (await ended(client, (await begin(client, content)).id)).status == "completed"
    for file_id in fillers:
        await client.files.delete(file_id)


async def cancel_unknown(bus: Bus, number: int) -> None:
    """Cancel batches that have not begun."""
    for _ in range(number):
        await batch_log.cancel_by_id(bus, "t", secrets.token_hex(8))
