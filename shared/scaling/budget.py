"""Division of a budget of workers over pools, and sizes by schedules and by operators. Pure."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from shared.scaling.pools import PoolSettings, ScalingSettings


class Claim(Struct, frozen=True):
    """Demand of a pool for the budget, and the part of it that its workers already use."""

    settings: PoolSettings
    target: int
    """Number of workers between the pool's min and max."""
    num_present: int
    """Running and starting workers, without given up ones."""


def divide(budget: int, free: int, claims: Mapping[str, Claim]) -> dict[str, int]:
    """Grant each pool its min, then the rest by priority; pools of one priority take turns.

    A pool grows only into `free`, the part of the budget that no worker uses. The part of another
    pool becomes free when its workers have ended. Only the min of a pool does not wait for that.
    """
    grants = _grant_by_priority(budget, claims)
    free = max(0, free)
    for name in _by_priority(claims):
        claim, grant = claims[name], grants[name]
        new = min(max(0, grant - claim.num_present), free)
        free -= new
        grants[name] = max(min(grant, claim.num_present + new), min(grant, claim.settings.min))
    return grants


def _grant_by_priority(budget: int, claims: Mapping[str, Claim]) -> dict[str, int]:
    grants = {name: claim.settings.min for name, claim in claims.items()}
    left = budget - sum(grants.values())
    for _, group in groupby(_by_priority(claims), lambda name: claims[name].settings.priority):
        open_claims = [name for name in group if grants[name] < claims[name].target]
        while open_claims and left > 0:
            # Each pool gets the same number, limited by the smallest claim and by the rest.
            least = min(claims[name].target - grants[name] for name in open_claims)
            share = min(least, left // len(open_claims))
            for index, name in enumerate(open_claims):
                grants[name] += share or int(index < left)
            left = budget - sum(grants.values())
            open_claims = [name for name in open_claims if grants[name] < claims[name].target]
    return grants


def _by_priority(claims: Mapping[str, Claim]) -> list[str]:
    return sorted(claims, key=lambda name: (-claims[name].settings.priority, name))


def with_schedule(
    settings: ScalingSettings, now: datetime, starts_s: Mapping[str, float]
) -> ScalingSettings:
    """Return the settings with the minima and the shifts that apply at a local time.

    `starts_s` has the time of a start by pool. A shift begins that much earlier, so that its
    workers are ready at its first minute.
    """
    pools = {}
    for name, pool in settings.pools.items():
        soon = now + timedelta(seconds=starts_s.get(name, 0.0))
        shifts = tuple(s for s in pool.schedule if s.covers(now) or s.covers(soon))
        current = replace(pool, schedule=shifts)
        pools[name] = replace(current, min=current.largest_min)
    return replace(settings, pools=pools)


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
        name: replace(pool, min=held[name], max=held[name], schedule=()) if name in sizes else pool
        for name, pool in settings.pools.items()
    }
    return ScalingSettings(pools, settings.edges, settings.budget)
