"""Which waiting pictures go through the tower together. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    item: T
    cost: int


class BatchQueue(Generic[T]):
    """In order of arrival. There is no timer: what comes while a batch is computed is the next."""

    def __init__(self, max_cost: int) -> None:
        self._max_cost = max_cost
        self._waiting: deque[_Waiting[T]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, cost: int) -> None:
        self._waiting.append(_Waiting(item, cost))

    def take(self) -> list[T]:
        """The next batch: as many as `max_cost` has room for, and at least one if any waits."""
        batch: list[T] = []
        room = self._max_cost
        while self._waiting and (not batch or self._waiting[0].cost <= room):
            waiting = self._waiting.popleft()
            room -= waiting.cost
            batch.append(waiting.item)
        return batch
