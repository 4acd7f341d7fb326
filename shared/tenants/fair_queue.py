"""Fair queue: picks the next waiter across tenants, and the one to reject when it is full. Pure."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Tenants take turns; the waiters of one tenant are started in the order of their arrival.

    A waiter is held from `add` until `finish`: first it waits, then it is being served.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        """Waiters by tenant, the next tenant first; tenants without waiters are left out."""
        self._num_held: dict[str, int] = {}
        """Number of held waiters by tenant, without zeros."""

    def add(self, tenant: str, waiter: T, max_held: int) -> T | None:
        """Add a waiter, and return the waiter to reject if more than `max_held` would be held.

        It is the newest waiter of the tenant that has the most. If the tenant of `waiter` has as
        many, `waiter` itself is returned, and is not added.
        """
        rejected = None
        if sum(self._num_held.values()) >= max_held:
            num_own = self._num_held.get(tenant, 0)
            heaviest = max(self._waiting, key=self._num_held.__getitem__, default=tenant)
            if self._num_held.get(heaviest, 0) <= num_own + 1:
                return waiter
            rejected = self._waiting[heaviest][-1]
            self.withdraw(heaviest, rejected)
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._num_held[tenant] = self._num_held.get(tenant, 0) + 1
        return rejected

    def start_next(self) -> T | None:
        """Return the waiter to serve now; None if there is none."""
        if not self._waiting:
            return None
        tenant, waiting = next(iter(self._waiting.items()))
        del self._waiting[tenant]
        waiter = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting
        return waiter

    def has_waiting_besides(self, tenant: str) -> bool:
        """Return whether another tenant has a waiter that has not been started."""
        return len(self._waiting) > (tenant in self._waiting)

    def withdraw(self, tenant: str, waiter: T) -> None:
        """Remove a waiter that has not been started."""
        waiting = self._waiting[tenant]
        waiting.remove(waiter)
        if not waiting:
            del self._waiting[tenant]
        self.finish(tenant)

    def finish(self, tenant: str) -> None:
        """Release a waiter that has been served."""
        self._num_held[tenant] -= 1
        if not self._num_held[tenant]:
            del self._num_held[tenant]
