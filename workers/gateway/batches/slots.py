"""Slots of lines in flight: a limit for each model, which tenants share by their weights.

A free slot goes to the tenant with the least time in slots so far, divided by its weight, and
within a tenant to the batch whose window ends first. Time is counted in lines that have ended, so
lines cost their tenants nothing while a model stands still.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

MIN_SLOTS = 8
"""Slots of a model without workers, so that a pool at zero gets requests and starts one."""
LINES_PER_SEQUENCE = 2
"""Lines in flight for each sequence that the engines can compute at once. So their queues do not
run dry."""


def num_slots(num_sequences: int, num_batches: int, num_elsewhere: float) -> int:
    """Return a batcher's share of the lines in flight of a model.

    Batchers share by their numbers of batches, so one without any leaves all lines to the others.
    """
    share = max(1, num_batches) / (max(1, num_batches) + num_elsewhere)
    return max(MIN_SLOTS, int(LINES_PER_SEQUENCE * num_sequences * share))


@dataclass(slots=True, order=True)
class _Waiter:
    deadline_s: int
    number: int
    turn: asyncio.Future[None] = field(compare=False)


@dataclass(slots=True)
class _Share:
    """Use of a model's slots by one tenant."""

    weight: float
    used: float
    """Sum of the times for which its lines have held slots."""
    num_held: int = 0
    waiting: list[_Waiter] = field(default_factory=list)
    """Heap of the waiting lines."""

    @property
    def has_waiting(self) -> bool:
        while self.waiting and self.waiting[0].turn.cancelled():
            heapq.heappop(self.waiting)
        return bool(self.waiting)


class _ModelSlots:
    """The slots of one model."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.limit = MIN_SLOTS
        self._weights = weights
        self._shares: dict[str, _Share] = {}
        """Tenants with a line that waits or holds a slot."""
        self._numbers = itertools.count()

    @property
    def num_held(self) -> int:
        return sum(share.num_held for share in self._shares.values())

    def add(self, tenant: str, deadline_s: int) -> asyncio.Future[None]:
        """Return a future that is done when a line of this tenant has a slot."""
        if tenant not in self._shares:
            # A tenant without lines saves nothing for later.
            used = min((s.used / s.weight for s in self._shares.values()), default=0.0)
            weight = self._weights.get(tenant, 1.0)
            self._shares[tenant] = _Share(weight, used * weight)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(deadline_s, next(self._numbers), turn)
        heapq.heappush(self._shares[tenant].waiting, waiter)
        self.assign()
        return turn

    def release(self, tenant: str) -> None:
        for share in self._shares.values():
            share.used += share.num_held
        self._shares[tenant].num_held -= 1
        self.assign()

    def assign(self) -> None:
        """Give free slots to waiting lines."""
        while self.num_held < self.limit:
            waiting = [share for share in self._shares.values() if share.has_waiting]
            if not waiting:
                break
            share = min(waiting, key=self._expected_use)
            share.num_held += 1
            heapq.heappop(share.waiting).turn.set_result(None)
        for tenant, share in list(self._shares.items()):
            if not (share.num_held or share.has_waiting):
                del self._shares[tenant]

    def _expected_use(self, share: _Share) -> float:
        """Return the use of a tenant with one more line, for its weight.

        A line holds its slot until about as many lines have ended as are in flight.
        """
        return (share.used + (share.num_held + 1) * (self.num_held + 1)) / share.weight


class LineSlots:
    """The slots of one batcher. For one event loop."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._models = defaultdict[str, _ModelSlots](lambda: _ModelSlots(weights))

    @property
    def num_held(self) -> int:
        return sum(slots.num_held for slots in self._models.values())

    def set_limit(self, model: str, limit: int) -> None:
        """Set the number of slots of a model. Held slots stay held."""
        self._models[model].limit = limit
        self._models[model].assign()

    @contextlib.asynccontextmanager
    async def slot(self, model: str, tenant: str, deadline_s: int) -> AsyncIterator[None]:
        """Wait for a slot of a model, and hold it during the body."""
        slots = self._models[model]
        turn = slots.add(tenant, deadline_s)
        try:
            await turn
            yield
        finally:
            if turn.cancelled():
                slots.assign()
            else:
                slots.release(tenant)
