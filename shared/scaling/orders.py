"""Sizes set by operators, within the limits of the configuration. Pure."""

from collections.abc import Mapping

from msgspec.structs import replace

from shared.scaling.budget import Claim, divide
from shared.scaling.pools import ScalingSettings


def with_sizes(settings: ScalingSettings, sizes: Mapping[str, int]) -> ScalingSettings:
    """Return the settings with fixed sizes for the pools that operators have set.

    A size stays stored when the configuration changes. It is limited by the pool's `max`, and by
    the part of the budget that the `min` of the other pools leave, by priority.
    """
    claims = {}
    for name, pool in settings.pools.items():
        size = max(0, min(sizes.get(name, pool.min), pool.max))
        claims[name] = Claim(replace(pool, min=min(pool.min, size)), size, size)
    budget = settings.budget
    if budget is None:
        budget = sum(claim.target for claim in claims.values())
    held = divide(budget, budget, claims)
    pools = {
        name: replace(pool, min=held[name], max=held[name]) if name in sizes else pool
        for name, pool in settings.pools.items()
    }
    return ScalingSettings(pools, settings.edges, settings.budget)
