"""Slots of lines in flight: a limit for each model, which tenants share by their weights.

A free slot goes to the tenant whose lines have held slots for the least time for its weight, and
within a tenant to the batch whose window ends first.
"""

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

MIN_SLOTS = 8
"""Slots of a model without workers, so that a pool at zero gets requests and starts one."""
MAX_COUNTED = 256
"""Lines after which the mean time of a line forgets half of the earlier ones."""


@dataclass(slots=True, order=True)
class _Waiter:
    deadline_s: int
    number: int
    turn: asyncio.Future[None] = field(compare=False)


@dataclass(slots=True)
class _Share:
    """Use of a model's slots by one tenant."""

    weight: float
    used_s: float
    """Time for which its lines have held slots, the sum of all lines."""
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

    def __init__(self, weights: Mapping[str, float], clock: Callable[[], float]) -> None:
        self.limit = MIN_SLOTS
        self._weights = weights
        self._clock = clock
        self._counted_to_s = clock()
        self._shares: dict[str, _Share] = {}
        """Tenants with a line that waits or holds a slot."""
        self._numbers = itertools.count()
        # The mean time of a line, from which the time of lines in flight is estimated.
        self._line_s, self._num_lines = 1.0, 1.0

    @property
    def num_held(self) -> int:
        return sum(share.num_held for share in self._shares.values())

    def add(self, tenant: str, deadline_s: int) -> asyncio.Future[None]:
        """Return a future that is done when a line of this tenant has a slot."""
        self._count()
        if tenant not in self._shares:
            # A tenant without lines saves nothing for later.
            used = min((s.used_s / s.weight for s in self._shares.values()), default=0.0)
            weight = self._weights.get(tenant, 1.0)
            self._shares[tenant] = _Share(weight, used * weight)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(deadline_s, next(self._numbers), turn)
        heapq.heappush(self._shares[tenant].waiting, waiter)
        self.assign()
        return turn

    def release(self, tenant: str) -> None:
        self._count()
        self._shares[tenant].num_held -= 1
        self._num_lines += 1
        if self._num_lines > MAX_COUNTED:
            self._line_s, self._num_lines = self._line_s / 2, self._num_lines / 2
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
        """Return the use of a tenant with one more line, for its weight."""
        mean_s = self._line_s / self._num_lines
        return (share.used_s + (share.num_held + 1) * mean_s) / share.weight

    def _count(self) -> None:
        """Count the use since the last call."""
        now_s = self._clock()
        elapsed_s, self._counted_to_s = now_s - self._counted_to_s, now_s
        for share in self._shares.values():
            share.used_s += share.num_held * elapsed_s
            self._line_s += share.num_held * elapsed_s


class LineSlots:
    """The slots of one batcher. For one event loop."""

    def __init__(
        self, weights: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = defaultdict[str, _ModelSlots](lambda: _ModelSlots(weights, clock))

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
