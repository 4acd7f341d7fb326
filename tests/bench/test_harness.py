"""The statistics of measured values, and the order of turns."""

import pytest

from ops.harness.samples import Samples, in_turns


def test_a_percentile_is_interpolated_between_the_nearest_values() -> None:
    assert Samples([3.0]).p99 == 3.0
    assert Samples([0.0, *[1.0] * 98, 5.0]).p99 == pytest.approx(1.0 + 0.01 * 4.0)
    assert Samples([4.0, 1.0, 2.0]).median == 2.0
    assert Samples([4.0, 1.0, 2.0, 3.0]).percentile(50) == 2.5
    assert [Samples(range(101)).percentile(p) for p in (0, 95, 100)] == [0, 95, 100]


def test_the_interval_of_a_median_is_that_of_the_table() -> None:
    # Ranks 40 and 61 of 100, 22 and 39 of 60.
    assert Samples(range(1, 101)).interval() == (40, 61)
    assert Samples(range(1, 61)).interval() == (22, 39)
    assert Samples([5.0]).interval() == (5.0, 5.0)


def test_setups_take_turns_in_both_orders() -> None:
    turns = list(in_turns("ab", rounds=2, warm_ups=1))
    assert turns == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]
