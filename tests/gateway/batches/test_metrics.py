"""Metrics of batches, as `pagemill metrics` reports them."""

from openai import AsyncOpenAI

from shared.bus.bus import Bus
from shared.telemetry import cluster_snapshot
from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl
from tests.gateway.conftest import Process
from tests.support.waiting import until
from workers.gateway.batches.slots import MIN_SLOTS

NUM_LINES = 100
NUM_ANSWERED = 30


async def values_of(bus: Bus) -> dict[str, float]:
    """Return the values of all metrics of batches; a label follows the name."""
    series = cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
    labels = ("state", "outcome", "status", "reason")
    return {
        " ".join([item.name, *(item.labels[label] for label in labels if label in item.labels)]): (
            item.value
        )
        for item in series
        if "batch" in item.name
    }


async def test_lines_are_counted_by_their_state(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus
) -> None:
    values: dict[str, float] = {}

    async def read(name: str, value: float) -> bool:
        values.update(await values_of(batch_bus))
        return values.get(name) == value

    await until(lambda: read("batches_ended_total completed", 0))
    assert values["batches_unfinished"] == values["oldest_batch_age_seconds"] == 0
    with rig.model.held_after(NUM_ANSWERED):
        batch = await begin(client, jsonl([chat_line(n) for n in range(NUM_LINES)]))
        await until(lambda: read("batch_lines_total answered", NUM_ANSWERED))
        assert values["batch_lines_unfinished in_flight"] == MIN_SLOTS
        assert values["batch_lines_unfinished waiting"] == NUM_LINES - NUM_ANSWERED - MIN_SLOTS
        assert values["batch_lines_unfinished unwritten"] == 0
        assert values["batches_unfinished"] == 1
        assert values["oldest_batch_age_seconds"] > 0
        assert values["batches_late"] == 0
        assert {values[f"batches_paused {code}"] for code in ("disk_full", "overloaded")} == {0}
    assert (await ended(client, batch.id)).status == "completed"
    await until(lambda: read("batches_unfinished", 0))
    unfinished = [values[f"batch_lines_unfinished {state}"] for state in ("waiting", "in_flight")]
    assert unfinished == [0, 0]
    assert values["batches_ended_total completed"] == 1
    assert values["batches_ended_total expired"] == 0
