"""Cluster snapshots on a real server."""

import asyncio
import os
import secrets
from functools import partial

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat, MetricSeries
from shared.telemetry import cluster_snapshot
from shared.telemetry.deltas import total
from shared.telemetry.metrics import Metrics
from shared.telemetry.prometheus import to_text


def reply_with(answer: bytes, _: bytes) -> bytes:
    return answer


async def start(bus: Bus, worker: str, *, answers: bool = True) -> Metrics:
    """Publish a worker's heartbeat, and reply with its metrics."""
    metrics = Metrics("engine", worker, "demo")
    beat = Heartbeat("engine", worker, "0", os.getpid(), ["demo"], {})
    await bus.heartbeats.publish(worker, to_json(beat))
    if answers:
        await bus.add_responder(subjects.METRICS, lambda _: to_json(metrics.snapshot()))
    return metrics


async def test_every_worker_replies_to_one_request(bus: Bus) -> None:
    workers = [f"engine-{secrets.token_hex(4)}" for _ in range(3)]
    for number, worker in enumerate(workers):
        metrics = await start(bus, worker)
        metrics.counter("prompt_tokens_total").add(number)
    snapshot = await cluster_snapshot.take_snapshot(bus)
    assert [total(snapshot.samples[w], "prompt_tokens_total", worker=w) for w in workers] == [
        0,
        1,
        2,
    ]
    assert {beat.worker for beat in snapshot.beats} >= set(workers)


async def test_a_silent_worker_is_not_up(bus: Bus) -> None:
    alive, silent = (f"engine-{secrets.token_hex(4)}" for _ in range(2))
    await start(bus, alive)
    await start(bus, silent, answers=False)
    series = cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
    up = {s.labels["worker"]: s.value for s in series if s.name == "up"}
    assert (up[alive], up[silent]) == (1, 0)


async def test_invalid_replies_are_ignored(bus: Bus) -> None:
    worker = f"engine-{secrets.token_hex(4)}"
    metrics = await start(bus, worker)
    metrics.counter("prompt_tokens_total").add(5)
    reply = metrics.snapshot()
    own = reply.series[0]
    odd = [
        MetricSeries("of_a_later_version", own.labels, 1),
        MetricSeries("prompt_tokens_total", {"no such": "label"}, 1),
        MetricSeries("prompt_tokens_total", own.labels, 1, [1.0], [1, 2]),
        MetricSeries("inter_token_latency_seconds", own.labels, 1, [1.0], [1]),
    ]
    for answer in (b"", b"\xff", b"[]", b'{"worker": 5}', b"# HELP x\n"):
        await bus.add_responder(subjects.METRICS, partial(reply_with, answer))
    liar = to_json({"role": "engine", "worker": "liar", "series": [own, *odd]})
    await bus.add_responder(subjects.METRICS, lambda _: liar)
    # The request ends only when all workers have replied.
    last = await start(bus, f"engine-{secrets.token_hex(4)}")
    last.counter("prompt_tokens_total").add(7)
    snapshot = await cluster_snapshot.take_snapshot(bus)
    assert total(snapshot.samples[worker], "prompt_tokens_total") == 5
    assert total(snapshot.samples[last.snapshot().worker], "prompt_tokens_total") == 7
    assert snapshot.metrics["liar"].series == [own]
    assert b"prompt_tokens_total" in to_text(cluster_snapshot.to_series(snapshot))


async def test_the_queues_of_all_slots_are_one(bus: Bus, model: str) -> None:
    stream, lane, sequences = subjects.STAGES_STREAM, "batch", []
    for slot in (2, None, 0):
        durable = subjects.stage_consumer("engine", model, lane, slot)
        subject = subjects.stage_filter("engine", model, lane, slot)
        await bus.queues.create(stream, durable, subject, 30.0)
        name = f"{model}-{slot}"
        await bus.publish(subjects.stage("engine", model, lane, name, slot), b"task", name)
        stored = await bus.read_last(stream, subject)
        assert stored is not None
        sequences.append(stored.stored_ms)
    snapshot = await cluster_snapshot.take_snapshot(bus)
    (queue,) = [queue for queue in snapshot.queues if queue.model == model]
    assert (queue.lane, queue.num_pending, queue.oldest_ms) == (lane, 3, min(sequences))


async def test_queues_have_depth_and_age(bus: Bus, model: str) -> None:
    lanes = {}
    for lane in subjects.LANES:
        lanes[lane] = await bus.queues.consume(
            subjects.STAGES_STREAM,
            subjects.stage_consumer("renderer", model, lane),
            subjects.stage_filter("renderer", model, lane),
            1,
            30.0,
        )
    for name in "abc":
        subject = subjects.stage("renderer", model, "batch", f"{model}-{name}")
        await bus.publish(subject, b"task", f"{model}-{name}")
    in_hand = await lanes["batch"].next()
    await asyncio.sleep(0.05)
    snapshot = await cluster_snapshot.take_snapshot(bus)
    queues = {queue.lane: queue for queue in snapshot.queues if queue.model == model}
    second = await bus.read_next(
        subjects.STAGES_STREAM,
        in_hand.sequence + 1,
        subjects.stage_filter("renderer", model, "batch"),
    )
    assert second is not None
    assert (queues["batch"].num_pending, queues["batch"].num_in_flight) == (2, 1)
    assert queues["batch"].oldest_ms == second.stored_ms
    assert queues["interactive"].oldest_ms is None
    ages = {
        series.labels["lane"]: series.value
        for series in cluster_snapshot.to_series(snapshot)
        if series.name == "queue_oldest_age_seconds" and series.labels["model"] == model
    }
    assert ages["interactive"] == 0
    assert ages["batch"] >= 0.05
    for consumer in lanes.values():
        await consumer.stop()
