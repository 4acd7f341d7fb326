"""Who is next of those who wait, and who must go when there are too many: fair to tenants. Pure."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Tenants take turns, and each one's waiters come in their order.

    Whoever has entered is held until it leaves: first it waits, then it has its turn.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        """Of tenants that have any, the next one first."""
        self._num_held: dict[str, int] = {}
        """By tenant, of those that have any."""

    def enter(self, tenant: str, waiter: T, max_held: int) -> T | None:
        """Returns who must go so that at most `max_held` are held: the newest that waits of the
        tenant with the most, or `waiter` itself where its own tenant has as many. None: nobody."""
        gone = None
        if sum(self._num_held.values()) >= max_held:
            mine = self._num_held.get(tenant, 0)
            heaviest = max(self._waiting, key=self._num_held.__getitem__, default=tenant)
            if self._num_held.get(heaviest, 0) <= mine + 1:
                return waiter
            gone = self._waiting[heaviest][-1]
            self.withdraw(heaviest, gone)
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._num_held[tenant] = self._num_held.get(tenant, 0) + 1
        return gone

    def next(self) -> T | None:
        """Who has its turn now; None if nobody waits."""
        if not self._waiting:
            return None
        tenant, waiting = next(iter(self._waiting.items()))
        del self._waiting[tenant]
        waiter = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting
        return waiter

    def withdraw(self, tenant: str, waiter: T) -> None:
        """Of one that still waits."""
        waiting = self._waiting[tenant]
        waiting.remove(waiter)
        if not waiting:
            del self._waiting[tenant]
        self.leave(tenant)

    def leave(self, tenant: str) -> None:
        """Of one that has had its turn."""
        self._num_held[tenant] -= 1
        if not self._num_held[tenant]:
            del self._num_held[tenant]
