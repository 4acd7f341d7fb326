"""Shares of tenants in a limited resource of a worker, such as memory for bodies. Pure."""

from collections import Counter


class TenantShares:
    """Total amount of a resource, which tenants take and give back.

    After each `take`, a tenant holds at most `ratio` times as much as is still free. With a ratio
    of 1, one greedy tenant gets half of the total, and two get a third each. With a ratio of 3,
    one gets three quarters. Without tenants, a caller may hold the whole.
    """

    def __init__(self, total: int, *, has_tenants: bool, ratio: int = 1) -> None:
        self._total = self._free = total
        self._has_tenants = has_tenants
        self._ratio = ratio
        self._held: Counter[str] = Counter()

    def change(self, total: int, *, has_tenants: bool) -> None:
        """Change the total and the rule. Amounts that tenants hold stay theirs."""
        self._free += total - self._total
        self._total, self._has_tenants = total, has_tenants

    def take(self, tenant: str, amount: int) -> bool:
        """Take an amount for a tenant, until `give_back`. Return False if it is not available."""
        free = self._free - amount
        if free < 0 or (self._has_tenants and self._held[tenant] + amount > self._ratio * free):
            return False
        self._free = free
        self._held[tenant] += amount
        return True

    def give_back(self, tenant: str, amount: int) -> None:
        self._free += amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
