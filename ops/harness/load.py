"""Load at a fixed rate."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

MAX_OPEN = 400


async def at_rate(
    per_s: float, send: Callable[[int], Awaitable[None]], has_ended: Callable[[int], bool]
) -> None:
    """Start `send(number)` at each tick, and wait for all that were started.

    At most `MAX_OPEN` run at once; a tick beyond that starts none. The load ends before the first
    number for which `has_ended` is true. The first exception cancels the others.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    running: set[asyncio.Task[None]] = set()

    async def call(number: int) -> None:
        await send(number)

    async with asyncio.TaskGroup() as group:
        for number in itertools.count():
            await asyncio.sleep(began + number / per_s - loop.time())
            if has_ended(number):
                break
            if len(running) < MAX_OPEN:
                task = group.create_task(call(number))
                running.add(task)
                task.add_done_callback(running.discard)
