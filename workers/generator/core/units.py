"""Queue of units of work from many requests, which are computed in batches.

A unit is one chunk of a sound, or one denoising step of an image. The most urgent unit is next, for
example the chunk of the client that would run out of sound first. Units of other requests join its
batch if they have the same shape, in order of urgency.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Work = TypeVar("Work")


@dataclass(frozen=True, slots=True)
class Unit(Generic[Work]):
    """One computation for one request."""

    request_id: str
    shape: Hashable
    """Units of equal shapes can be computed as one batch."""
    due_s: float
    """Time that orders the units: the end of the sound that the client has, or the time at which
    the request was accepted."""
    work: Work
    number: int = 0
    """Number of the image in its request."""

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.number


class UnitQueue(Generic[Work]):
    """Waiting units. A sound or image has one unit at a time, so its units stay in order."""

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
        units = [unit for unit in self._waiting.values() if unit.request_id == request_id]
        for unit in units:
            del self._waiting[unit.key]
        return units

    def discard(self, unit: Unit[Work]) -> None:
        """Remove a unit, if it still waits."""
        if self._waiting.get(unit.key) is unit:
            del self._waiting[unit.key]

    def take(self) -> list[Unit[Work]]:
        """Remove and return the next batch, the most urgent unit first; empty if no unit waits."""
        by_urgency = sorted(self._waiting.values(), key=lambda unit: unit.due_s)
        batch = [unit for unit in by_urgency if unit.shape == by_urgency[0].shape]
        for unit in batch[: self._max_batch]:
            del self._waiting[unit.key]
        return batch[: self._max_batch]
