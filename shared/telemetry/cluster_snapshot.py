"""Snapshots of the whole cluster: the workers' metrics and the depths of the broker's queues.

All workers reply to a single request, and clients' requests are not read. So the cost depends on
the number of workers and models, not on their load.
"""

import asyncio
from collections.abc import Iterable

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.figures import QueueDepth
from shared.errors import NotFound
from shared.protocol import subjects
from shared.protocol.messages import (
    PLAN_AGE_S,
    Heartbeat,
    MetricSeries,
    PoolPlan,
    WorkerMetrics,
    decode_metrics,
    decode_scale_plan,
)
from shared.telemetry.catalog import METRICS, OWN_LABELS
from shared.telemetry.deltas import ClusterSnapshot, StageQueue

# Time to wait for the reply of a worker with a heartbeat, which may be dead or busy.
REPLY_TIMEOUT_S = 0.5

BROKER_DOWN = MetricSeries("broker_up", {}, 0)


async def take_snapshot(bus: Bus) -> ClusterSnapshot:
    """Take a snapshot. Raises Unavailable without a broker, or without Pagemill's streams."""
    # These reads come first, because they fail at once without the streams.
    shared_in_flight, _ = await bus.figures.size(subjects.REQUESTS_STREAM)
    in_flight, oldest_ms = await request_queue.size(bus)
    dead_letters, _ = await bus.figures.size(subjects.DEAD_STREAM)
    num_batches, oldest_batch_ms = await bus.figures.size(subjects.BATCHJOBS_STREAM)
    beats = await bus.heartbeats.read()
    starting = await bus.heartbeats.read_starts()
    starting += [r for r in await bus.heartbeats.read_refusals() if not r.pid]
    queues, metrics = await asyncio.gather(
        bus.figures.depths(subjects.STAGES_STREAM),
        _request_metrics(bus, {beat.worker for beat in beats}),
    )
    return ClusterSnapshot(
        at_ms=bus.now_ms(),
        beats=sorted(beats, key=lambda beat: (beat.role, beat.worker)),
        metrics=metrics,
        queues=[
            *await _coordinator_queue(bus),
            *_merge(await asyncio.gather(*(_stage_queue(bus, queue) for queue in queues))),
        ],
        in_flight=in_flight,
        shared_in_flight=shared_in_flight,
        oldest_ms=oldest_ms,
        dead_letters=dead_letters,
        num_batches=num_batches,
        oldest_batch_ms=oldest_batch_ms,
        pools=await _pools(bus),
        starting=sorted(starting, key=lambda report: (report.role, report.worker)),
    )


async def _pools(bus: Bus) -> dict[str, PoolPlan]:
    """Return the plans that the leading autoscaler has written within PLAN_AGE_S."""
    last = await bus.read_last(subjects.SCALE_STREAM, subjects.SCALE_PLAN)
    if last is None or bus.now_ms() - last.stored_ms > 1000 * PLAN_AGE_S:
        return {}
    plan = decode_scale_plan(last.data)
    return {} if plan is None else plan.pools


async def _coordinator_queue(bus: Bus) -> list[StageQueue]:
    """Return the coordinators' queues as one queue, if there are any.

    The age of its oldest message is omitted, because the message would have to be read and may have
    megabytes.
    """
    try:
        num_pending, num_in_flight = await request_queue.depth(bus)
    except NotFound:
        return []
    return [StageQueue("coordinator", "", "", num_pending, num_in_flight, None)]


async def _stage_queue(bus: Bus, depth: QueueDepth) -> StageQueue:
    return StageQueue(
        *subjects.parts_of_stage(depth.subject),
        num_pending=depth.num_pending,
        num_in_flight=depth.num_in_flight,
        oldest_ms=await bus.figures.oldest_pending_ms(subjects.STAGES_STREAM, depth),
    )


def _merge(queues: Iterable[StageQueue]) -> list[StageQueue]:
    """Add up the queues of the slots of a lane."""
    merged: dict[tuple[str, str, str], StageQueue] = {}
    for queue in queues:
        key = queue.role, queue.model, queue.lane
        if (total := merged.get(key)) is None:
            merged[key] = queue
            continue
        times = [ms for ms in (total.oldest_ms, queue.oldest_ms) if ms is not None]
        merged[key] = StageQueue(
            *key,
            num_pending=total.num_pending + queue.num_pending,
            num_in_flight=total.num_in_flight + queue.num_in_flight,
            oldest_ms=min(times, default=None),
        )
    return [*merged.values()]


async def _request_metrics(bus: Bus, expected: set[str]) -> dict[str, WorkerMetrics]:
    """Return the metrics by worker, as soon as all of `expected` have replied."""
    by_worker: dict[str, WorkerMetrics] = {}

    def accept(reply: bytes) -> bool:
        # Any client may reply on a subject. Replies that are not metrics are ignored.
        if (metrics := decode_metrics(reply)) is not None:
            series = [item for item in metrics.series if _is_known(item)]
            by_worker[metrics.worker] = WorkerMetrics(metrics.role, metrics.worker, series)
        return expected <= by_worker.keys()

    await bus.request_many(subjects.METRICS, accept, REPLY_TIMEOUT_S)
    return by_worker


def _is_known(series: MetricSeries) -> bool:
    """Return whether a series is complete and in the catalog of this version."""
    if (spec := METRICS.get(series.name)) is None:
        return False
    num_buckets = len(series.bounds) + 1 if spec.kind == "histogram" else 0
    return {*OWN_LABELS, *spec.labels} == series.labels.keys() and (
        num_buckets == len(series.counts)
    )


def to_series(snapshot: ClusterSnapshot) -> list[MetricSeries]:
    """Return the series of all workers and of the broker's state."""
    return [
        *(series for metrics in snapshot.metrics.values() for series in metrics.series),
        *(_up(snapshot, beat) for beat in snapshot.beats),
        *(series for queue in snapshot.queues for series in _queue_series(snapshot, queue)),
        MetricSeries("requests_in_flight", {}, snapshot.in_flight),
        MetricSeries("shared_requests_in_flight", {}, snapshot.shared_in_flight),
        MetricSeries("oldest_request_age_seconds", {}, _age_s(snapshot, snapshot.oldest_ms)),
        MetricSeries("batches_unfinished", {}, snapshot.num_batches),
        MetricSeries("oldest_batch_age_seconds", {}, _age_s(snapshot, snapshot.oldest_batch_ms)),
        MetricSeries("dead_letters", {}, snapshot.dead_letters),
        MetricSeries("broker_up", {}, 1),
    ]


def _up(snapshot: ClusterSnapshot, beat: Heartbeat) -> MetricSeries:
    labels = {"model": "", "role": beat.role, "worker": beat.worker}
    return MetricSeries("up", labels, beat.worker in snapshot.metrics)


def _queue_series(snapshot: ClusterSnapshot, queue: StageQueue) -> list[MetricSeries]:
    labels = {"model": queue.model, "role": queue.role, "lane": queue.lane}
    series = [
        MetricSeries("queue_pending", labels, queue.num_pending),
        MetricSeries("queue_ack_pending", labels, queue.num_in_flight),
    ]
    if queue.oldest_ms is not None or not queue.num_pending:
        age_s = _age_s(snapshot, queue.oldest_ms)
        series.append(MetricSeries("queue_oldest_age_seconds", labels, age_s))
    return series


def _age_s(snapshot: ClusterSnapshot, stored_ms: float | None) -> float:
    return 0.0 if stored_ms is None else max(0.0, snapshot.at_ms - stored_ms) / 1000
