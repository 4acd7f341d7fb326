"""Tasks in the background that no caller awaits, and limited numbers of tasks at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class TaskSet(set[asyncio.Task[None]]):
    """Set of running tasks. It refers to them, because the event loop has only weak references."""

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def run_for_each(
    work: Callable[[Item], Awaitable[Result]], items: Iterable[Item], at_once: int
) -> list[Result]:
    """Run `work` for all items, at most `at_once` at a time, and return the results.

    A failure of one leaves the others. Raises the first one when all have ended.
    """
    credit = asyncio.Semaphore(at_once)

    async def run(item: Item) -> Result:
        async with credit:
            return await work(item)

    outcomes = await asyncio.gather(*map(run, items), return_exceptions=True)
    results: list[Result] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results
