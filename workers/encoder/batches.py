"""Batch queue: decides which waiting images go through the tower together. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    item: T
    cost: int


class BatchQueue(Generic[T]):
    """Queue in the order of arrival, without a timer: items that arrive during a batch are next."""

    def __init__(self, max_cost: int) -> None:
        self._max_cost = max_cost
        self._waiting: deque[_Waiting[T]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, cost: int) -> None:
        self._waiting.append(_Waiting(item, cost))

    def take(self) -> list[T]:
        """Return the next batch: all items that fit into `max_cost`, at least one if any waits."""
        batch: list[T] = []
        room = self._max_cost
        while self._waiting and (not batch or self._waiting[0].cost <= room):
            waiting = self._waiting.popleft()
            room -= waiting.cost
            batch.append(waiting.item)
        return batch
