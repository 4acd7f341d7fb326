"""Slots of lines in flight: a limit for each model, which tenants share by their weights.

A free slot goes to the tenant with the fewest lines in flight for its weight, and within a tenant
to the batch whose window ends first.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
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


@dataclass(slots=True, eq=False)
class _Waiter:
    tenant: str
    deadline_s: int
    turn: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LineSlots:
    """The slots of one batcher. For one event loop."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._limits: dict[str, int] = {}
        self._held: dict[str, Counter[str]] = {}
        """Slots by model and tenant."""
        self._waiting: dict[str, list[_Waiter]] = {}

    @property
    def num_held(self) -> int:
        return sum(held.total() for held in self._held.values())

    def set_limit(self, model: str, limit: int) -> None:
        """Set the number of slots of a model. Held slots stay held."""
        self._limits[model] = limit
        self._assign(model)

    async def acquire(self, model: str, tenant: str, deadline_s: int) -> None:
        """Wait for a slot, and hold it until `release`."""
        waiter = _Waiter(tenant, deadline_s)
        self._waiting.setdefault(model, []).append(waiter)
        self._assign(model)
        try:
            await asyncio.shield(waiter.turn)
        except asyncio.CancelledError:
            if waiter.turn.done():
                self.release(model, tenant)
            else:
                self._waiting[model].remove(waiter)
            raise

    def release(self, model: str, tenant: str) -> None:
        held = self._held[model]
        held[tenant] -= 1
        if not held[tenant]:
            del held[tenant]
        self._assign(model)

    def _assign(self, model: str) -> None:
        waiting = self._waiting.get(model, [])
        held = self._held.setdefault(model, Counter())
        while waiting and held.total() < self._limits.get(model, MIN_SLOTS):
            chosen = min(
                waiting,
                key=lambda w: (held[w.tenant] / self._weights.get(w.tenant, 1.0), w.deadline_s),
            )
            waiting.remove(chosen)
            held[chosen.tenant] += 1
            chosen.turn.set_result(None)
