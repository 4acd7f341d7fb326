"""Batch queue: selects the waiting images that go through the tower together. Pure."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class BatchQueue(Generic[T]):
    """Queue in order of arrival. There is no timer: items that arrive during a batch are next."""

    def __init__(self, max_cost: int) -> None:
        self._max_cost = max_cost
        self._waiting: deque[tuple[T, int]] = deque()
        """Items with their costs."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, cost: int) -> None:
        self._waiting.append((item, cost))

    def take(self) -> list[T]:
        """Return the next batch: all first items that fit into `max_cost`, at least one if any."""
        batch: list[T] = []
        room = self._max_cost
        while self._waiting and (not batch or self._waiting[0][1] <= room):
            item, cost = self._waiting.popleft()
            room -= cost
            batch.append(item)
        return batch
