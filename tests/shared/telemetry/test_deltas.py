"""Increases between two snapshots, and quantiles of histograms."""

import math
from bisect import bisect_left
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from shared.protocol.messages import MetricSeries, WorkerMetrics
from shared.telemetry.catalog import LONG_S, SHORT_S
from shared.telemetry.deltas import (
    ClusterSnapshot,
    Samples,
    buckets,
    increase_between,
    increases,
    quantile,
    samples_of,
    total,
)
from shared.telemetry.metrics import Histogram, Metrics

NAME = "time_to_first_token_seconds"

amounts = st.lists(st.integers(0, 1000), max_size=5)
values = st.lists(st.floats(0.0001, 5000), min_size=1, max_size=50)


def counted(amount: float, worker: str = "w") -> Samples:
    series = MetricSeries("prompt_tokens_total", {"worker": worker}, amount)
    return samples_of(WorkerMetrics("engine", worker, [series]))


def observed(values: list[float], worker: str = "w") -> Samples:
    metrics = Metrics("engine", worker)
    for value in values:
        metrics.histogram(NAME).observe(value)
    return samples_of(metrics.snapshot())


def survey(at_s: float, **counters: tuple[float, float]) -> ClusterSnapshot:
    """Build a snapshot from each worker's start in seconds and its count."""
    return ClusterSnapshot(
        at_ms=1000 * at_s,
        beats=[],
        metrics={
            worker: WorkerMetrics(
                "engine",
                worker,
                [
                    MetricSeries("start_time_seconds", {"worker": worker}, started_s),
                    MetricSeries("prompt_tokens_total", {"worker": worker}, amount),
                ],
            )
            for worker, (started_s, amount) in counters.items()
        },
        queues=[],
        in_flight=0,
        shared_in_flight=0,
        oldest_ms=None,
        dead_letters=0,
    )


@given(st.lists(amounts, min_size=1, max_size=4))
def test_increases_add_up_over_restarts(lives: list[list[int]]) -> None:
    """Take a snapshot after every addition.

    Each life begins at zero, and its first count is below the last one of the previous life,
    because a restart could not be detected otherwise.
    """
    increase, before, expected = 0.0, counted(0), 0
    for life in lives:
        value = 0
        for amount in life:
            value += amount
            now = counted(value)
            grown = total(increases(before, now), "prompt_tokens_total")
            assert grown >= 0
            increase += grown
            before = now
        expected += value
        # The first count of the next life is below the last one of this life.
        before = counted(math.inf)
    assert increase == expected


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=10))
def test_more_snapshots_do_not_change_the_total(amounts: list[int]) -> None:
    looks = [counted(amount) for amount in sorted(amounts)]
    parts = [total(increases(a, b), "prompt_tokens_total") for a, b in pairwise(looks)]
    assert sum(parts) == total(increases(looks[0], looks[-1]), "prompt_tokens_total")


def test_new_workers_count_from_zero_and_silent_ones_not_at_all() -> None:
    before = survey(100, old=(1, 7))
    now = survey(110, old=(1, 9), young=(105, 5), silent=(50, 1000))
    grown = {worker: increase_between(before, now, worker) for worker in now.metrics}
    assert grown["silent"] is None
    assert {w: total(s, "prompt_tokens_total") for w, s in grown.items() if s is not None} == {
        "old": 2,
        "young": 5,
    }


@given(values, values)
def test_a_histogram_increase_has_only_the_new_observations(
    earlier: list[float], later: list[float]
) -> None:
    between = increases(observed(earlier), observed(earlier + later))
    assert buckets([between], NAME) == buckets([observed(later)], NAME)


@given(values, values)
def test_histograms_of_several_workers_add_up(mine: list[float], yours: list[float]) -> None:
    parts = [observed(mine, "mine"), observed(yours, "yours")]
    assert buckets(parts, NAME) == buckets([observed(mine + yours)], NAME)
    assert buckets(parts, NAME, worker="mine") == buckets([observed(mine)], NAME)


@given(values, st.floats(0, 1))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    value = quantile(buckets([observed(values)], NAME), q)
    assert value is not None
    # The smallest value that is not below a fraction q of the observations.
    rank = next(rank for rank in range(1, len(values) + 1) if rank >= q * len(values))
    true = sorted(values)[rank - 1]
    index = bisect_left(LONG_S, true)
    low = LONG_S[index - 1] if index else 0.0
    high = LONG_S[index] if index < len(LONG_S) else LONG_S[-1]
    assert low <= value <= high


@given(values, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_are_monotonic(values: list[float], a: float, b: float) -> None:
    assume(a <= b)
    series = buckets([observed(values)], NAME)
    low, high = quantile(series, a), quantile(series, b)
    assert low is not None
    assert high is not None
    assert low <= high


def test_an_empty_histogram_has_no_quantile() -> None:
    assert quantile([], 0.5) is None
    assert quantile(buckets([samples_of(_empty())], NAME), 0.5) is None


def _empty() -> WorkerMetrics:
    metrics = Metrics("engine", "w")
    metrics.histogram(NAME)
    return metrics.snapshot()


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 40)), max_size=20))
def test_observing_a_count_equals_single_observations(pairs: list[tuple[float, int]]) -> None:
    at_once, singly = Histogram(SHORT_S), Histogram(SHORT_S)
    for value, count in pairs:
        at_once.observe(value, count)
        for _ in range(count):
            singly.observe(value)
    assert at_once.counts == singly.counts
    assert math.isclose(at_once.total, singly.total)
