"""Recent use of a model by each tenant, and the tenants that exceed their share. Pure.

Use decays with time. A tenant's share is the mean use of all recently active tenants, times its
weight. So a single tenant never exceeds its share, and neither do tenants with equal use.
"""

from collections.abc import Mapping

HALF_LIFE_S = 5.0
"""Time after which a use counts half."""
FACTOR = 1.25
"""Multiple of its share that a tenant may use, because use is never exactly even."""
FORGOTTEN = 0.01
"""Use below which a tenant no longer counts as active."""


class TenantUse:
    """Recent use of one model by each tenant, with its decay."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._used: dict[str, float] = {}
        self._faded_s = 0.0

    def add(self, tenant: str, cost: float, now_s: float) -> None:
        """Add the cost of a request, a positive number."""
        left = 0.5 ** (max(0.0, now_s - self._faded_s) / HALF_LIFE_S)
        self._faded_s = max(now_s, self._faded_s)
        self._used = {t: u * left for t, u in self._used.items() if u * left > FORGOTTEN}
        self._used[tenant] = self._used.get(tenant, 0.0) + cost

    def exceeds_share(self, tenant: str) -> bool:
        """Return whether the tenant uses more than its share of the total."""
        weights = sum(map(self._weight, self._used))
        share = sum(self._used.values()) * self._weight(tenant) / weights if weights else 0.0
        return self._used.get(tenant, 0.0) > FACTOR * share

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
