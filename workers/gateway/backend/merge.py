"""Several token logs merged into one sequence of records."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge_logs(logs: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Yield records as they arrive, each with the number of its log. Raises what a log raises.

    No log is read ahead by more than one record. A caller that stops early leaves no reader behind.
    """
    waiting: dict[asyncio.Future[T | None], int] = {}

    def read_next(part: int) -> None:
        waiting[asyncio.ensure_future(anext(logs[part], None))] = part

    try:
        for part in range(len(logs)):
            read_next(part)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                part, record = waiting[task], task.result()
                del waiting[task]
                if record is not None:
                    yield part, record
                    read_next(part)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
