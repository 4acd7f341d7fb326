"""Frame of `pagemill top`: the state of a cluster, and rates since the last snapshot."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from shared.protocol.versions import range_words
from shared.telemetry.deltas import (
    ClusterSnapshot,
    Samples,
    StageQueue,
    buckets,
    increase_between,
    quantile,
    total,
)


class Pool(Struct, frozen=True):
    """Workers of one role and the same models, or a stage with a queue and without workers."""

    role: str
    models: list[str]
    workers: int
    silent: int
    """Workers with a heartbeat that did not report their metrics in time."""
    versions: list[str]
    reads: list[str]
    """Versions of messages that they read, such as `1-3`; `?` if a worker does not report it."""


class StartingRow(Struct, frozen=True):
    worker: str
    model: str
    """Empty for a role whose workers serve all models."""
    step: str
    """Current step of the start."""
    done_bytes: int
    """Number of bytes of weights that were read."""
    total_bytes: int
    """0 in a step that reads no weights."""


class ScaleRow(Struct, frozen=True):
    """Pool that an autoscaler scales."""

    pool: str
    state: str
    wanted: int
    running: int
    starting: int
    draining: int
    reason: str


class QueueRow(Struct, frozen=True):
    stage: str
    model: str
    lane: str
    pending: int
    in_flight: int
    oldest_s: float | None
    """Age of the oldest pending message; None without one."""


class Throughput(Struct, frozen=True):
    """Rates since the last snapshot.

    All are None in a first frame; ratios and quantiles are None in an interval without events.
    """

    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    requests_per_s: float | None
    time_to_first_token_p50_s: float | None
    time_to_first_token_p95_s: float | None
    inter_token_latency_p50_s: float | None
    prefix_hit_rate: float | None
    """Share of the looked-up tokens that were in the prefix cache."""


class Totals(Struct, frozen=True):
    """Counters since the start of the present workers."""

    prompt_tokens: int
    generation_tokens: int
    requests: int
    """Answers that ended without an error."""
    prefix_queries: int
    """Tokens that were looked up in the prefix cache."""
    prefix_hits: int
    preemptions: int


class ModelRow(Struct, frozen=True):
    model: str
    flow: Throughput
    totals: Totals


class EngineRow(Struct, frozen=True):
    worker: str
    model: str
    running: int
    waiting: int
    kv_cache_usage: float
    """Share of the blocks in use, 0 to 1."""
    kv_waste: float
    """Share of the slots in used blocks that hold no token, 0 to 1."""
    flow: Throughput
    totals: Totals
    device_busy: float | None = None
    """Share of the time since the last snapshot in which the device ran steps; None at first."""
    gpu_utilization: float | None = None
    """Share of the last second in which the GPU computed, 0 to 1; None if it is not reported."""
    gpu_memory_usage: float | None = None
    """Share of the GPU's memory in use, 0 to 1; None without a GPU."""


class Frame(Struct, frozen=True):
    at_ms: float
    """Unix milliseconds of the broker's clock."""
    interval_s: float | None
    """Seconds since the last snapshot; None for a first frame."""
    in_flight: int
    oldest_request_s: float | None
    dead_letters: int
    pools: list[Pool]
    queues: list[QueueRow]
    models: list[ModelRow]
    engines: list[EngineRow]
    starting: list[StartingRow] = []
    scale: list[ScaleRow] = []


def frame(before: ClusterSnapshot | None, now: ClusterSnapshot) -> Frame:
    engines = [
        (beat.worker, model)
        for beat in now.beats
        if beat.role == "engine" and beat.worker in now.samples
        for model in beat.models[:1]
    ]
    by_model: dict[str, list[str]] = {}
    for worker, model in engines:
        by_model.setdefault(model, []).append(worker)
    return Frame(
        at_ms=now.at_ms,
        interval_s=_interval_s(before, now),
        in_flight=now.in_flight,
        oldest_request_s=_age_s(now, now.oldest_ms),
        dead_letters=now.dead_letters,
        pools=_pools(now),
        queues=[_queue_row(now, queue) for queue in sorted(now.queues, key=_queue_order)],
        models=[
            ModelRow(model, _flow(before, now, workers), _totals(now, workers))
            for model, workers in sorted(by_model.items())
        ],
        engines=[_engine_row(before, now, worker, model) for worker, model in engines],
        starting=[
            StartingRow(r.worker, r.model, r.step, r.done_bytes, r.total_bytes)
            for r in now.starting
        ],
        scale=[
            ScaleRow(name, p.state, p.wanted, p.running, p.starting, p.draining, p.reason)
            for name, p in sorted(now.pools.items())
        ],
    )


def _pools(now: ClusterSnapshot) -> list[Pool]:
    keys = dict.fromkeys((beat.role, *beat.models) for beat in now.beats)
    pools = []
    for role, *models in keys:
        beats = [b for b in now.beats if b.role == role and b.models == models]
        silent = sum(beat.worker not in now.metrics for beat in beats)
        versions = sorted({beat.version for beat in beats})
        reads = sorted({range_words(beat.reads) for beat in beats})
        pools.append(Pool(role, models, len(beats), silent, versions, reads))
    served = {(beat.stage or beat.role, model) for beat in now.beats for model in beat.models}
    queues = dict.fromkeys((queue.role, queue.model) for queue in now.queues if queue.model)
    empty = (queue for queue in queues if queue not in served)
    return pools + [Pool(stage, [model], 0, 0, [], []) for stage, model in empty]


def _queue_order(queue: StageQueue) -> tuple[str, str, bool]:
    return queue.role, queue.model, queue.lane != "interactive"


def _queue_row(now: ClusterSnapshot, queue: StageQueue) -> QueueRow:
    return QueueRow(
        queue.role,
        queue.model,
        queue.lane,
        queue.num_pending,
        queue.num_in_flight,
        _age_s(now, queue.oldest_ms),
    )


def _engine_row(
    before: ClusterSnapshot | None, now: ClusterSnapshot, worker: str, model: str
) -> EngineRow:
    samples = now.samples[worker]
    gpu_bytes = total(samples, "gpu_memory_total_bytes")
    used_bytes = total(samples, "gpu_memory_used_bytes")
    has_gpu = "gpu_utilization" in samples
    interval_s = _interval_s(before, now)
    part = None if before is None else increase_between(before, now, worker)
    busy = None
    if part is not None and interval_s is not None:
        busy = min(1.0, total(part, "engine_device_seconds_total") / interval_s)
    return EngineRow(
        worker=worker,
        model=model,
        running=int(total(samples, "num_requests_running")),
        waiting=int(total(samples, "num_requests_waiting")),
        kv_cache_usage=total(samples, "kv_cache_usage_perc"),
        kv_waste=total(samples, "kv_waste"),
        flow=_flow(before, now, [worker]),
        totals=_totals(now, [worker]),
        device_busy=busy,
        gpu_utilization=total(samples, "gpu_utilization") if has_gpu else None,
        gpu_memory_usage=used_bytes / gpu_bytes if gpu_bytes else None,
    )


def _flow(
    before: ClusterSnapshot | None, now: ClusterSnapshot, workers: Sequence[str]
) -> Throughput:
    interval_s = _interval_s(before, now)
    if before is None or interval_s is None:
        return Throughput(None, None, None, None, None, None, None)
    parts = [
        part for worker in workers if (part := increase_between(before, now, worker)) is not None
    ]
    queries = _sum(parts, "prefix_cache_queries_total")
    first_token = buckets(parts, "time_to_first_token_seconds")
    return Throughput(
        prompt_tokens_per_s=_sum(parts, "prompt_tokens_total") / interval_s,
        generation_tokens_per_s=_sum(parts, "generation_tokens_total") / interval_s,
        requests_per_s=_sum(parts, "request_success_total") / interval_s,
        time_to_first_token_p50_s=quantile(first_token, 0.5),
        time_to_first_token_p95_s=quantile(first_token, 0.95),
        inter_token_latency_p50_s=quantile(buckets(parts, "inter_token_latency_seconds"), 0.5),
        prefix_hit_rate=_sum(parts, "prefix_cache_hits_total") / queries if queries else None,
    )


def _totals(now: ClusterSnapshot, workers: Sequence[str]) -> Totals:
    parts = [now.samples[worker] for worker in workers]
    return Totals(
        prompt_tokens=int(_sum(parts, "prompt_tokens_total")),
        generation_tokens=int(_sum(parts, "generation_tokens_total")),
        requests=int(_sum(parts, "request_success_total")),
        prefix_queries=int(_sum(parts, "prefix_cache_queries_total")),
        prefix_hits=int(_sum(parts, "prefix_cache_hits_total")),
        preemptions=int(_sum(parts, "num_preemptions_total")),
    )


def _sum(parts: Iterable[Samples], name: str) -> float:
    return sum(total(part, name) for part in parts)


def _interval_s(before: ClusterSnapshot | None, now: ClusterSnapshot) -> float | None:
    if before is None or now.at_ms <= before.at_ms:
        return None
    return (now.at_ms - before.at_ms) / 1000


def _age_s(now: ClusterSnapshot, stored_ms: float | None) -> float | None:
    return None if stored_ms is None else max(0.0, now.at_ms - stored_ms) / 1000
