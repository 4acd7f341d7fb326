"""Batch queue: selects the waiting items that are computed together. Pure."""

from bisect import insort
from typing import Generic, TypeVar

T = TypeVar("T")


class BatchQueue(Generic[T]):
    """Queue in order of turns. There is no timer: items that arrive during a batch are next."""

    def __init__(self, max_cost: int) -> None:
        self._max_cost = max_cost
        self._num_added = 0
        self._waiting: list[tuple[float, int, int, T]] = []
        """Turn, number, cost and item. The numbers differ, so items are not compared."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, cost: int, turn: float = 0.0) -> None:
        """Add an item after all items of the same turn or an earlier one."""
        self._num_added += 1
        insort(self._waiting, (turn, self._num_added, cost, item))

    def take(self) -> list[T]:
        """Return the next batch: all first items that fit into `max_cost`, at least one if any."""
        room, num_taken = self._max_cost, 0
        for _, _, cost, _ in self._waiting:
            if num_taken and cost > room:
                break
            room -= cost
            num_taken += 1
        batch = [item for _, _, _, item in self._waiting[:num_taken]]
        del self._waiting[:num_taken]
        return batch
