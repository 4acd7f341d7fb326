"""Recent use of tenants: which of them uses more than its share. Pure.

Use fades with time. A tenant's share is the mean of the tenants that have used something lately,
times its weight; so a tenant that is alone never exceeds its share, nor do tenants that use alike.
"""

from collections.abc import Mapping

HALF_LIFE_S = 5.0
"""Time after which half of a use is left."""
FACTOR = 1.25
"""Tenants may use so many times their share, since their use is never exactly even."""
FORGOTTEN = 0.01
"""What is left of a request's use when its tenant no longer counts."""


class TenantUse:
    """What each tenant has used lately of one model, with what is left of it."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._used: dict[str, float] = {}
        self._faded_s = 0.0

    def add(self, tenant: str, cost: float, now_s: float) -> None:
        """Count the cost of a request, which is positive."""
        left = 0.5 ** (max(0.0, now_s - self._faded_s) / HALF_LIFE_S)
        self._faded_s = max(now_s, self._faded_s)
        self._used = {t: u * left for t, u in self._used.items() if u * left > FORGOTTEN}
        self._used[tenant] = self._used.get(tenant, 0.0) + cost

    def exceeds_share(self, tenant: str) -> bool:
        """Return whether the tenant uses more than its share of what all use."""
        weights = sum(map(self._weight, self._used))
        share = sum(self._used.values()) * self._weight(tenant) / weights if weights else 0.0
        return self._used.get(tenant, 0.0) > FACTOR * share

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
