"""The library's connection, with what it does wrong mended.

Mended is what one caller's bad luck does there to all others.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

T = TypeVar("T")

# Two missed pings of two seconds: a peer that has gone silent is noticed after six seconds
# instead of the library's six minutes.
PING_INTERVAL_S = 2
MAX_OUTSTANDING_PINGS = 2
RECONNECT_WAIT_S = 0.1

ANSWER_TIMEOUT_S = 2.0

_log = structlog.get_logger()


class _Connection(NatsClient):
    async def _process_pong(self) -> None:
        # Who waited for it may have given up. The library's reader would end by that, and the
        # connection be deaf until its own pings are missed.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        # Where its writer has ended by the loss, the library writes in the caller's name: who
        # subscribes would be told that he has not, and keep it for ever. Subscriptions are made
        # again with the next connection, and what was published is missed by its ack.
        with contextlib.suppress(OSError, RuntimeError):
            return await _heeding(super()._flush_pending(force_flush))

    async def request(self, *args: Any, **kwargs: Any) -> Msg:
        return await _heeding(super().request(*args, **kwargs))

    async def flush(self, *args: Any, **kwargs: Any) -> None:
        await _heeding(super().flush(*args, **kwargs))


async def next_of(subscription: Subscription, timeout_s: float) -> Msg:
    """Raises the library's TimeoutError, or another Error of it."""
    return await _heeding(subscription.next_msg(timeout=timeout_s))


async def _heeding(work: Awaitable[T]) -> T:
    """What `work` gives, unless it is cancelled.

    The library waits by `asyncio.wait_for`. Until Python 3.12 that forgets a cancellation which
    comes together with the answer, and a task that asks again and again would never end. Where it
    waits for its own queue to be written, it drops every cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await work
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def connect(
    url: str,
    name: str,
    timeout_s: float,
    disconnected: Callable[[], Awaitable[None]],
    reconnected: Callable[[], Awaitable[None]],
) -> NatsClient:
    """One that reconnects for ever. `url` may name several servers, with commas between.

    Raises TimeoutError, OSError or the library's Error when none of them answers.
    """
    nc = _Connection()
    try:
        async with asyncio.timeout(timeout_s):
            connecting = nc.connect(
                [part.strip() for part in url.split(",")],
                name=name,
                disconnected_cb=disconnected,
                reconnected_cb=reconnected,
                error_cb=_report,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=MAX_OUTSTANDING_PINGS,
                # Declared as whole seconds, used as a delay.
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                pending_size=64 * 2**20,
            )
            await _heeding(connecting)
    except (TimeoutError, OSError, NatsError):
        await nc.close()
        raise
    return nc


async def _report(error: Exception) -> None:
    # Every attempt to reconnect reports that it was refused; `disconnected` has said so.
    if not isinstance(error, OSError):
        _log.warning("nats_error", error=str(error) or type(error).__name__)
