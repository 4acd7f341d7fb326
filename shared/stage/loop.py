"""A worker's loop over its deliveries, and its end: the first signal drains, the second hurries."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shared.bus.consumer import Consumer, Delivery

_log = structlog.get_logger()


class Shutdown:
    """When a worker is to stop: `asked` begins the drain, `hurry` ends it at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def signal(self) -> None:
        """The first call asks, the second one hurries."""
        (self.hurry if self.asked.is_set() else self.asked).set()

    async def drained(self, running: set[asyncio.Task[None]], drain_s: float) -> None:
        """Returns when all of `running` are done, or there is no more time for them."""
        if not running:
            return
        done = asyncio.create_task(asyncio.wait(running, timeout=drain_s))
        hurried = asyncio.create_task(self.hurry.wait())
        await asyncio.wait({done, hurried}, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        hurried.cancel()


Handler = Callable[[Delivery], Awaitable[None]]


async def serve(consumer: Consumer, handle: Handler, shutdown: Shutdown, drain_s: float) -> None:
    """Run `handle` for every delivery until `shutdown`; then finish what is in hand.

    Handlers that are not done after `drain_s` are cancelled: they hand their job back.
    """
    running: set[asyncio.Task[None]] = set()
    stop = asyncio.create_task(shutdown.asked.wait())
    while not shutdown.asked.is_set():
        delivery = asyncio.create_task(consumer.next())
        await asyncio.wait({delivery, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not delivery.done():
            delivery.cancel()
            break
        task = asyncio.create_task(_run(handle, delivery.result()))
        running.add(task)
        task.add_done_callback(running.discard)
    await consumer.stop()
    await shutdown.drained(running, drain_s)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _run(handle: Handler, delivery: Delivery) -> None:
    try:
        await handle(delivery)
    except Exception:
        _log.exception("unsettled", subject=delivery.subject, attempt=delivery.attempt)
        delivery.abandon()
