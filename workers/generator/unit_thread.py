"""Thread that computes units of several requests, batch by batch."""

from typing import TypeVar

from shared.helpers.batch_thread import BatchThread, Pending
from shared.stage.inputs import RequestEnded
from workers.generator.core.units import Unit, UnitQueue

Item = TypeVar("Item")
Result = TypeVar("Result")


class UnitThread(BatchThread[Item, Result]):
    """Thread with a queue of units and their cancellation; a subclass has the computation."""

    def __init__(self, name: str, max_batch: int) -> None:
        super().__init__(name)
        self._queue: UnitQueue[Pending[Item, Result]] = UnitQueue(max_batch)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def _compute_unit(self, unit: Unit[Pending[Item, Result]]) -> Result:
        """Return the result of a unit.

        Raises RequestEnded after `cancel`, and an error of the computation only for the unit that
        causes it.
        """
        self._queue.add(unit)
        try:
            return await self._result_of(unit.work)
        finally:
            self._queue.discard(unit)

    def cancel(self, request_id: str) -> None:
        """Cancel the waiting units of a request."""
        for unit in self._queue.cancel(request_id):
            if not unit.work.done.done():
                unit.work.done.set_exception(RequestEnded())

    def _take(self) -> list[Pending[Item, Result]]:
        return [unit.work for unit in self._queue.take()]
