"""Increases, sums and quantiles between two snapshots of a cluster.

A worker that started between the snapshots counts from zero. A worker that is missing in the first
snapshot without a restart has no increase.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from shared.protocol.messages import Heartbeat, PoolPlan, StartReport, WorkerMetrics

Labels = frozenset[tuple[str, str]]
Samples = Mapping[str, Mapping[Labels, float]]
"""Values by name and labels. A histogram is a series of cumulative buckets, as in Prometheus."""


@dataclass(frozen=True, slots=True)
class StageQueue:
    """Queue of one lane of a stage. Model and lane are empty for the coordinators' queue."""

    role: str
    model: str
    lane: str
    num_pending: int
    """Number of messages that wait for a worker."""
    num_in_flight: int
    oldest_ms: float | None
    """Storage time of the oldest pending message, if known: Unix ms of the broker's clock."""


@dataclass(frozen=True)
class ClusterSnapshot:
    """State of a cluster at one moment."""

    at_ms: float
    beats: list[Heartbeat]
    metrics: dict[str, WorkerMetrics]
    """Metrics by worker, for the workers that have replied."""
    queues: list[StageQueue]
    in_flight: int
    """Number of requests that have not ended."""
    shared_in_flight: int
    """Number of these requests in the queue of trusted publishers."""
    oldest_ms: float | None
    """Acceptance time of the oldest of these requests: Unix ms of the broker's clock."""
    dead_letters: int
    num_batches: int = 0
    """Number of batches that have not ended."""
    oldest_batch_ms: float | None = None
    """Time at which the oldest of these batches was queued: Unix ms of the broker's clock."""
    starting: list[StartReport] = field(default_factory=list)
    """Reports of workers that are not ready."""
    pools: Mapping[str, PoolPlan] = field(default_factory=dict)
    """Plans of the leading autoscaler by pool; empty without one."""

    @cached_property
    def samples(self) -> dict[str, Samples]:
        """The same values as in `metrics`."""
        return {worker: samples_of(metrics) for worker, metrics in self.metrics.items()}


def samples_of(metrics: WorkerMetrics) -> Samples:
    """Convert a worker's series to samples."""
    samples: dict[str, dict[Labels, float]] = {}
    for series in metrics.series:
        labels = frozenset(series.labels.items())
        if not series.counts:
            samples.setdefault(series.name, {})[labels] = series.value
            continue
        by_labels = samples.setdefault(f"{series.name}_bucket", {})
        bounds = [*map(repr, series.bounds), "inf"]
        for bound, not_above in zip(bounds, accumulate(series.counts), strict=True):
            by_labels[labels | {("le", bound)}] = not_above
    return samples


def increase_between(before: ClusterSnapshot, now: ClusterSnapshot, worker: str) -> Samples | None:
    """Return the increases of a worker between two snapshots; None if they are unknown."""
    samples = now.samples[worker]
    if worker in before.samples:
        return increases(before.samples[worker], samples)
    started_after = 1000 * total(samples, "start_time_seconds") >= before.at_ms
    return samples if started_after else None


def increases(before: Samples, now: Samples) -> Samples:
    """Return the increase of each sample. A value that has shrunk was reset to zero."""
    return {
        name: {
            labels: value - earlier
            if (earlier := before.get(name, {}).get(labels, 0.0)) <= value
            else value
            for labels, value in by_labels.items()
        }
        for name, by_labels in now.items()
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of all series that have these labels."""
    values = samples.get(name, {}).items()
    return math.fsum(value for own, value in values if labels.items() <= own)


def buckets(parts: Iterable[Samples], name: str, **labels: str) -> list[tuple[float, float]]:
    """Merge a histogram: return each upper bound with the number of observations up to it."""
    counts: dict[float, float] = {}
    for samples in parts:
        for own, value in samples.get(f"{name}_bucket", {}).items():
            if labels.items() <= own:
                bound = float(dict(own)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
    return sorted(counts.items())


def quantile(buckets: list[tuple[float, float]], q: float) -> float | None:
    """Estimate the quantile `q`, assuming an even distribution within each bucket.

    Values above all bounds count as the highest bound. Return None without observations.
    """
    count = buckets[-1][1] if buckets else 0.0
    if count <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, not_above in buckets:
        if not_above >= q * count and not_above > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * max(0.0, q * count - below) / (not_above - below)
        lower, below = bound, not_above
    raise AssertionError("cumulative bucket counts must not decrease")
