"""Sizes that an operator has set, and the limits of the configuration."""

from hypothesis import given
from hypothesis import strategies as st

from shared.scaling.budget import with_sizes
from shared.scaling.pools import PoolSettings, ScalingSettings
from tests.shared.scaling.test_policy import NAMES, scaling_settings

POOLS = {"engine": PoolSettings(max=4), "encoder": PoolSettings(max=4)}


def sizes(settings: ScalingSettings, orders: dict[str, int]) -> dict[str, tuple[int, int]]:
    pools = with_sizes(settings, orders).pools
    return {name: (pool.min, pool.max) for name, pool in pools.items()}


def test_an_order_is_the_size_of_its_pool() -> None:
    settings = ScalingSettings(POOLS, (("encoder", "engine"),), budget=4)
    ordered = with_sizes(settings, {"engine": 3, "gone": 1})
    assert (ordered.pools["engine"].min, ordered.pools["engine"].max) == (3, 3)
    assert ordered.pools["encoder"] == POOLS["encoder"]
    assert (ordered.budget, ordered.edges) == (settings.budget, settings.edges)
    assert sizes(settings, {"engine": 0})["engine"] == (0, 0)


def test_an_order_of_before_max_was_lowered_counts_up_to_max() -> None:
    assert sizes(ScalingSettings(POOLS), {"engine": 6})["engine"] == (4, 4)


def test_an_order_counts_up_to_what_the_budget_leaves() -> None:
    pools = {**POOLS, "renderer": PoolSettings(min=1, max=2)}
    settings = ScalingSettings(pools, budget=4)
    assert sizes(settings, {"engine": 4})["engine"] == (3, 3)
    both = sizes(settings, {"engine": 4, "encoder": 1})
    assert (both["engine"], both["encoder"]) == ((2, 2), (1, 1))
    # An order below a pool's min leaves more to the others.
    assert sizes(settings, {"engine": 4, "renderer": 0})["engine"] == (4, 4)


def test_orders_are_cut_by_priority() -> None:
    pools = {"low": PoolSettings(max=4), "high": PoolSettings(max=4, priority=1)}
    settings = ScalingSettings(pools, budget=5)
    assert sizes(settings, {"low": 4, "high": 4}) == {"low": (1, 1), "high": (4, 4)}


@given(scaling_settings(), st.dictionaries(st.sampled_from(NAMES), st.integers(-3, 40)))
def test_no_order_exceeds_max_or_the_budget(
    settings: ScalingSettings, orders: dict[str, int]
) -> None:
    ordered = with_sizes(settings, orders)
    for name, pool in ordered.pools.items():
        assert pool.min <= pool.max <= settings.pools[name].max
        assert name in orders or pool == settings.pools[name]
    if settings.budget is None:
        for name, size in orders.items():
            assert ordered.pools[name].min == max(0, min(size, settings.pools[name].max))
