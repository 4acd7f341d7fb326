"""Units of work of many requests: which of them are computed together next.

A unit is one chunk of one request. The most urgent unit is next: the one whose client would run dry
first. Units of other requests join its batch if they have the same shape, the urgent ones first.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Work = TypeVar("Work")


@dataclass(frozen=True, slots=True)
class Unit(Generic[Work]):
    """What is computed for one request at one time."""

    request_id: str
    shape: Hashable
    """Units of equal shapes can be computed as one batch."""
    dry_at_s: float
    """When the client has played all that was made before; earlier is more urgent."""
    work: Work


class UnitQueue(Generic[Work]):
    """The units that wait. A request has one at a time, so its chunks keep their order."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._waiting: dict[str, Unit[Work]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, unit: Unit[Work]) -> None:
        assert unit.request_id not in self._waiting
        self._waiting[unit.request_id] = unit

    def cancel(self, request_id: str) -> Unit[Work] | None:
        """Remove the unit of a request, if it has one here, and return it."""
        return self._waiting.pop(request_id, None)

    def take(self) -> list[Unit[Work]]:
        """Remove the next batch and return it, the most urgent unit first; none if none waits."""
        by_urgency = sorted(self._waiting.values(), key=lambda unit: unit.dry_at_s)
        batch = [unit for unit in by_urgency if unit.shape == by_urgency[0].shape]
        for unit in batch[: self._max_batch]:
            del self._waiting[unit.request_id]
        return batch[: self._max_batch]
