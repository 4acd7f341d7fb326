"""Several logs as one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(logs: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Records as they come, with the number of their log. Raises what a log raises.

    None is read ahead by more than a record, and whoever stops leaves nothing behind that reads.
    """
    waiting: dict[asyncio.Task[T | None], int] = {}

    def ask(part: int) -> None:
        waiting[asyncio.create_task(_next(logs[part]))] = part

    try:
        for part in range(len(logs)):
            ask(part)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                part, record = waiting[task], task.result()
                del waiting[task]
                if record is not None:
                    yield part, record
                    ask(part)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(log: AsyncIterator[T]) -> T | None:
    return await anext(log, None)
