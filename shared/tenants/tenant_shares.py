"""Shares of tenants in what a worker has of something, such as memory for bodies. Pure."""

from collections import Counter


class TenantShares:
    """An amount of which each tenant may hold as much as is free then, and so at most half.

    A tenant that takes all it can leaves a half to the others, two such tenants leave a third.
    Where there is one tenant alone, it may hold the whole.
    """

    def __init__(self, total: int, *, has_tenants: bool) -> None:
        self._free = total
        self._has_tenants = has_tenants
        self._held: Counter[str] = Counter()

    def take(self, tenant: str, amount: int) -> bool:
        """Return whether the tenant now holds so much more, until `give_back`."""
        free = self._free - amount
        if free < 0 or (self._has_tenants and self._held[tenant] + amount > free):
            return False
        self._free = free
        self._held[tenant] += amount
        return True

    def give_back(self, tenant: str, amount: int) -> None:
        self._free += amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
