"""Thread that computes the items of several requests, batch by batch."""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.errors import OutOfMemory
from shared.helpers.device_errors import is_device_lost, is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")


def _new_future() -> "asyncio.Future[Result]":
    return asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True, eq=False)
class Pending(Generic[Item, Result]):
    """Item that waits for its result, or is being computed."""

    item: Item
    done: "asyncio.Future[Result]" = field(default_factory=_new_future)


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class BatchThread(ABC, Generic[Item, Result]):
    """Thread that computes one batch at a time. Subclasses have the queue and the computation."""

    def __init__(self, name: str) -> None:
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, name)
        self._began_s: float | None = None
        self.on_batch: Callable[[float], None] = lambda num_items: None
        self.memory_shortages = {"split": 0, "fail": 0}
        """Batches without enough memory: of several items, and of a single one."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Number of items in the queue."""

    @abstractmethod
    def _take(self) -> list[Pending[Item, Result]]:
        """Remove the next batch from the queue and return it; empty if nothing waits."""

    @abstractmethod
    def _compute(self, items: Sequence[Item]) -> Sequence[Result]:
        """Return one result for each item. Called in the thread."""

    @property
    def batch_s(self) -> float:
        """Age of the current batch; 0 between batches."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    async def _result_of(self, pending: Pending[Item, Result]) -> Result:
        """Return the result of an item that has just been added to the queue.

        If the computation fails, its error is raised for the item that caused it alone.
        """
        self._arrived.set()
        return await pending.done

    async def work(self) -> None:
        """Compute batch after batch until cancelled. Raises the error of a device that is lost."""
        while True:
            await self._arrived.wait()
            # No reference to an item may outlive its batch, because items are views of other
            # workers' memory. The last batch is empty.
            while batch := self._take():
                await self._serve([pending for pending in batch if not pending.done.done()])
                # Callers with a result may now add their next items to the waiting ones. A caller
                # that starts tasks for them needs a second turn of the event loop.
                for _ in range(2):
                    await asyncio.sleep(0)
            self._arrived.clear()

    async def _serve(self, batch: Sequence[Pending[Item, Result]]) -> None:
        if not batch:
            return
        try:
            results = await self._run([pending.item for pending in batch])
        except Exception as error:
            if is_device_lost(error):
                raise
            if is_out_of_memory(error):
                self.memory_shortages["split" if len(batch) > 1 else "fail"] += 1
                reason = "the device of this worker has too little memory for this item alone"
                error = _caused(OutOfMemory(reason), error)
            if len(batch) > 1:
                for pending in batch:
                    await self._serve([pending])
            elif not batch[0].done.done():
                batch[0].done.set_exception(error)
            return
        for pending, result in zip(batch, results, strict=True):
            if not pending.done.done():
                pending.done.set_result(result)

    async def _run(self, items: Sequence[Item]) -> Sequence[Result]:
        self.on_batch(len(items))
        self._began_s = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._compute, items)
        finally:
            self._began_s = None

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._thread.shutdown(wait=False, cancel_futures=True)
