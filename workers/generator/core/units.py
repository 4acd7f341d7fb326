"""Units of work of many requests: which of them are computed together next.

A unit is one chunk of a sound, or one denoising step of an image. The most urgent unit is next,
such as the chunk of the client that would run dry first. Units of other requests join its batch if
they have the same shape, the urgent ones first.
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
    due_s: float
    """Earlier is more urgent: when the client has played all that was made before, or when the
    request was accepted."""
    work: Work
    number: int = 0
    """Which of the request's images the unit belongs to."""

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.number


class UnitQueue(Generic[Work]):
    """The units that wait. A sound or image has one at a time, so its units keep their order."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._waiting: dict[tuple[str, int], Unit[Work]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, unit: Unit[Work]) -> None:
        assert unit.key not in self._waiting
        self._waiting[unit.key] = unit

    def cancel(self, request_id: str) -> list[Unit[Work]]:
        """Remove the units of a request and return them."""
        found = [unit for unit in self._waiting.values() if unit.request_id == request_id]
        for unit in found:
            del self._waiting[unit.key]
        return found

    def discard(self, unit: Unit[Work]) -> None:
        """Remove a unit, if it is still here."""
        if self._waiting.get(unit.key) is unit:
            del self._waiting[unit.key]

    def take(self) -> list[Unit[Work]]:
        """Remove the next batch and return it, the most urgent unit first; none if none waits."""
        by_urgency = sorted(self._waiting.values(), key=lambda unit: unit.due_s)
        batch = [unit for unit in by_urgency if unit.shape == by_urgency[0].shape]
        for unit in batch[: self._max_batch]:
            del self._waiting[unit.key]
        return batch[: self._max_batch]
