"""Division of a budget of workers over pools with priorities. Pure."""

from collections.abc import Mapping
from itertools import groupby

from msgspec import Struct

from shared.scaling.pools import PoolSettings


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
