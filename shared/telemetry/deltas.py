"""From what workers told, to what happened in between: increases, sums and quantiles. Pure.

Two surveys of the same cluster differ by what was counted meanwhile. A worker that has started
since counts from zero; one that has only been silent tells nothing about the time in between.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from shared.protocol.messages import Heartbeat, WorkerMetrics

Labels = frozenset[tuple[str, str]]
Samples = Mapping[str, Mapping[Labels, float]]
"""Values by name and labels; a histogram is its buckets, as Prometheus has them."""


@dataclass(frozen=True, slots=True)
class StageQueue:
    """Of a stage's lane; model and lane are empty for requests that wait for a coordinator."""

    role: str
    model: str
    lane: str
    pending: int
    """Messages that nobody has taken."""
    in_hand: int
    oldest_ms: float | None
    """When the oldest of the pending ones was stored, if known: Unix ms of the broker's clock."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster at one moment."""

    at_ms: float
    beats: list[Heartbeat]
    told: dict[str, WorkerMetrics]
    """By worker; of those that have answered."""
    queues: list[StageQueue]
    in_flight: int
    """Requests that have not ended."""
    oldest_ms: float | None
    """When the oldest of them was accepted."""
    dead_letters: int
    samples: dict[str, Samples] = field(default_factory=dict)
    """The same as `told`."""

    def __post_init__(self) -> None:
        self.samples.update({worker: samples_of(told) for worker, told in self.told.items()})


def samples_of(told: WorkerMetrics) -> Samples:
    found: dict[str, dict[Labels, float]] = {}
    for series in told.series:
        labels = frozenset(series.labels.items())
        if not series.counts:
            found.setdefault(series.name, {})[labels] = series.value
            continue
        by_labels = found.setdefault(f"{series.name}_bucket", {})
        bounds = [*map(repr, series.bounds), "inf"]
        for bound, not_above in zip(bounds, accumulate(series.counts), strict=True):
            by_labels[labels | {("le", bound)}] = not_above
    return found


def increase_between(before: ClusterSnapshot, now: ClusterSnapshot, worker: str) -> Samples | None:
    """What a worker has counted between two surveys; None where that cannot be told."""
    samples = now.samples[worker]
    if worker in before.samples:
        return increases(before.samples[worker], samples)
    started_after = 1000 * total(samples, "start_time_seconds") >= before.at_ms
    return samples if started_after else None


def increases(before: Samples, now: Samples) -> Samples:
    """Of everything that only grows. What is less than before has begun again from zero."""
    return {
        name: {
            labels: value - earlier if (earlier := _get(before, name, labels)) <= value else value
            for labels, value in by_labels.items()
        }
        for name, by_labels in now.items()
    }


def _get(samples: Samples, name: str, labels: Labels) -> float:
    return samples.get(name, {}).get(labels, 0.0)


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of all series that have these labels."""
    wanted = labels.items()
    return math.fsum(value for own, value in samples.get(name, {}).items() if wanted <= own)


def buckets(parts: Iterable[Samples], name: str, **labels: str) -> list[tuple[float, float]]:
    """A histogram's upper bounds, and how many observations of all parts are not above each."""
    found: dict[float, float] = {}
    for samples in parts:
        for own, value in samples.get(f"{name}_bucket", {}).items():
            if labels.items() <= own:
                bound = float(dict(own)["le"])
                found[bound] = found.get(bound, 0.0) + value
    return sorted(found.items())


def quantile(buckets: list[tuple[float, float]], q: float) -> float | None:
    """The value that a share of `q` is not above, as if each bucket were filled evenly.

    What is above all bounds counts as the highest of them. None where nothing was observed.
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
    raise AssertionError("counts of buckets do not grow")
