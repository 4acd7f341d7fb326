"""Batches whose results have no room: they pause, and continue when there is room."""

from typing import Any

import pytest
from openai import AsyncOpenAI, InternalServerError

from shared.batches.state import faults_of
from shared.bus.bus import Bus
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
from tests.support.waiting import until

SECTIONS: dict[str, Any] = {"batch": {"store_mib": 1}}
FILLER_BYTES = 1_000_000
"""It leaves room for the input of the batch, and not for its results."""
NUM_LINES = 150


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
