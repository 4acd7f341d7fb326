"""A look at the whole cluster: what its workers tell, and how the broker's queues stand.

One question is answered by all workers at once, and nothing is looked up by request: what it costs
depends on the number of workers and models, not on what they do.
"""

import asyncio
from collections.abc import Iterable

import msgspec
from prometheus_client.metrics_core import Metric

from shared import subjects
from shared.bus import Bus, Queue
from shared.exposition import family, merge, parse
from shared.messages import Heartbeat
from shared.metrics import LabelSet
from shared.readings import StageQueue, Survey

# For a worker whose heartbeat is still there, and which is dead or busy.
ANSWER_S = 0.5

_heartbeat = msgspec.json.Decoder(Heartbeat)


async def take(bus: Bus) -> Survey:
    """Raises Unavailable without a broker, or without a Pagemill in it."""
    # First what is answered at once if there is none.
    in_flight, oldest_ms = await bus.size(subjects.REQUESTS_STREAM)
    dead_letters, _ = await bus.size(subjects.DEAD_STREAM)
    beats = [_heartbeat.decode(data) for data in await bus.heartbeats()]
    queues, answers = await asyncio.gather(
        bus.queues(subjects.STAGES_STREAM),
        bus.ask_all(subjects.METRICS, len(beats), ANSWER_S),
    )
    return Survey(
        at_ms=bus.now_ms(),
        beats=sorted(beats, key=lambda beat: (beat.role, beat.worker)),
        told=_by_worker(answers),
        queues=list(await asyncio.gather(*(_look_into(bus, queue) for queue in queues))),
        in_flight=in_flight,
        oldest_ms=oldest_ms,
        dead_letters=dead_letters,
    )


async def _look_into(bus: Bus, queue: Queue) -> StageQueue:
    backlog, oldest = queue.backlog, None
    if backlog.waiting:
        stream, subject = subjects.STAGES_STREAM, queue.subject
        oldest = await bus.at(stream, backlog.delivered + 1, subject)
    return StageQueue(
        *subjects.parts_of_stage(queue.subject),
        pending=backlog.waiting,
        in_hand=backlog.in_hand,
        oldest_ms=None if oldest is None else oldest.stored_ms,
    )


def _by_worker(answers: Iterable[bytes]) -> dict[str, list[Metric]]:
    told: dict[str, list[Metric]] = {}
    for answer in answers:
        # Anybody may answer on a subject; what is no worker's is left out.
        try:
            metrics = parse(answer)
            worker = metrics[0].samples[0].labels["worker"]
        except (ValueError, LookupError):
            continue
        told[worker] = metrics
    return told


def as_metrics(survey: Survey) -> list[Metric]:
    """All that workers told, and what the broker knows."""
    up: list[tuple[LabelSet, float]] = [
        ((("model", ""), ("role", beat.role), ("worker", beat.worker)), beat.worker in survey.told)
        for beat in survey.beats
    ]
    oldest_s = _age_s(survey, survey.oldest_ms)
    return [
        *merge(metric for told in survey.told.values() for metric in told),
        *([family("up", up)] if up else []),
        *_queue_metrics(survey),
        family("requests_in_flight", [((), survey.in_flight)]),
        family("oldest_request_age_seconds", [((), oldest_s)]),
        family("dead_letters", [((), survey.dead_letters)]),
        family("broker_up", [((), 1)]),
    ]


def _queue_metrics(survey: Survey) -> list[Metric]:
    queues = [((("model", q.model), ("role", q.role), ("lane", q.lane)), q) for q in survey.queues]
    if not queues:
        return []
    return [
        family("queue_pending", [(labels, q.pending) for labels, q in queues]),
        family("queue_ack_pending", [(labels, q.in_hand) for labels, q in queues]),
        family(
            "queue_oldest_age_seconds",
            [(labels, _age_s(survey, q.oldest_ms)) for labels, q in queues],
        ),
    ]


def _age_s(survey: Survey, stored_ms: float | None) -> float:
    return 0.0 if stored_ms is None else max(0.0, survey.at_ms - stored_ms) / 1000
