"""A look at the whole cluster: what its workers tell, and how the broker's queues stand.

One question is answered by all workers at once, and nothing is looked up by request: what it costs
depends on the number of workers and models, not on what they do.
"""

import asyncio
import contextlib

import msgspec

from shared.bus.bus import Bus
from shared.bus.queue_depth import ConsumerQueue
from shared.errors import NotFound
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat, MetricSeries, WorkerMetrics
from shared.telemetry.catalog import METRICS, OWN_LABELS
from shared.telemetry.deltas import ClusterSnapshot, StageQueue

# For a worker whose heartbeat is still there, and which is dead or busy.
ANSWER_S = 0.5

BROKER_UP = MetricSeries("broker_up", {}, 1)
BROKER_DOWN = MetricSeries("broker_up", {}, 0)

_heartbeat = msgspec.json.Decoder(Heartbeat)
_metrics = msgspec.json.Decoder(WorkerMetrics)


async def take_snapshot(bus: Bus) -> ClusterSnapshot:
    """Raises Unavailable without a broker, or without a Pagemill in it."""
    # First what is answered at once if there is none.
    in_flight, oldest_ms = await bus.stream_size(subjects.REQUESTS_STREAM)
    dead_letters, _ = await bus.stream_size(subjects.DEAD_STREAM)
    beats = [_heartbeat.decode(data) for data in await bus.read_heartbeats()]
    queues, told = await asyncio.gather(
        bus.queue_depths(subjects.STAGES_STREAM), _ask(bus, {beat.worker for beat in beats})
    )
    return ClusterSnapshot(
        at_ms=bus.now_ms(),
        beats=sorted(beats, key=lambda beat: (beat.role, beat.worker)),
        told=told,
        queues=[
            *await _requests(bus),
            *await asyncio.gather(*(_look_into(bus, queue) for queue in queues)),
        ],
        in_flight=in_flight,
        oldest_ms=oldest_ms,
        dead_letters=dead_letters,
    )


async def _requests(bus: Bus) -> list[StageQueue]:
    """Of coordinators. How old the first is that waits there cannot be told without reading it, and
    it may have megabytes."""
    try:
        stream, consumer = subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER
        backlog = await bus.queue_depth(stream, consumer)
    except NotFound:
        return []
    return [StageQueue("coordinator", "", "", backlog.num_pending, backlog.num_in_flight, None)]


async def _look_into(bus: Bus, queue: ConsumerQueue) -> StageQueue:
    backlog, oldest = queue.depth, None
    if backlog.num_pending:
        stream, subject = subjects.STAGES_STREAM, queue.subject
        oldest = await bus.read_next(stream, backlog.last_delivered + 1, subject)
    return StageQueue(
        *subjects.parts_of_stage(queue.subject),
        pending=backlog.num_pending,
        in_hand=backlog.num_in_flight,
        oldest_ms=None if oldest is None else oldest.stored_ms,
    )


async def _ask(bus: Bus, expected: set[str]) -> dict[str, WorkerMetrics]:
    """What workers tell, by worker: as soon as all of those have answered."""
    told: dict[str, WorkerMetrics] = {}

    def take_snapshot(answer: bytes) -> bool:
        # Anybody may answer on a subject; what is no worker's is left out.
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            metrics = _metrics.decode(answer)
            known = [series for series in metrics.series if _is_known(series)]
            told[metrics.worker] = WorkerMetrics(metrics.role, metrics.worker, known)
        return expected <= told.keys()

    await bus.request_many(subjects.METRICS, take_snapshot, ANSWER_S)
    return told


def _is_known(series: MetricSeries) -> bool:
    """Not of another version of Pagemill, and whole."""
    if (described := METRICS.get(series.name)) is None:
        return False
    num_buckets = len(series.bounds) + 1 if described.kind == "histogram" else 0
    return {*OWN_LABELS, *described.labels} == series.labels.keys() and (
        num_buckets == len(series.counts)
    )


def to_series(survey: ClusterSnapshot) -> list[MetricSeries]:
    """All that workers told, and what the broker knows."""
    return [
        *(series for told in survey.told.values() for series in told.series),
        *(_up(beat, beat.worker in survey.told) for beat in survey.beats),
        *(series for queue in survey.queues for series in _of_queue(survey, queue)),
        MetricSeries("requests_in_flight", {}, survey.in_flight),
        MetricSeries("oldest_request_age_seconds", {}, _age_s(survey, survey.oldest_ms)),
        MetricSeries("dead_letters", {}, survey.dead_letters),
        BROKER_UP,
    ]


def _up(beat: Heartbeat, answered: bool) -> MetricSeries:
    labels = {"model": "", "role": beat.role, "worker": beat.worker}
    return MetricSeries("up", labels, answered)


def _of_queue(survey: ClusterSnapshot, queue: StageQueue) -> list[MetricSeries]:
    labels = {"model": queue.model, "role": queue.role, "lane": queue.lane}
    series = [
        MetricSeries("queue_pending", labels, queue.pending),
        MetricSeries("queue_ack_pending", labels, queue.in_hand),
    ]
    if queue.oldest_ms is not None or not queue.pending:
        age_s = _age_s(survey, queue.oldest_ms)
        series.append(MetricSeries("queue_oldest_age_seconds", labels, age_s))
    return series


def _age_s(survey: ClusterSnapshot, stored_ms: float | None) -> float:
    return 0.0 if stored_ms is None else max(0.0, survey.at_ms - stored_ms) / 1000
