"""Waits for replies, which end when their connection is replaced."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from nats.errors import TimeoutError as NatsTimeoutError

# Loop time, always in the past, at which a wait ends that gets no reply any more.
_LOST_S = 0.0


class ReplyLost(NatsTimeoutError):
    """The connection of a request was replaced before its reply came."""


class ReplyWaits:
    """The open waits of one client.

    A reply comes over the connection of its request. When that connection is lost, a wait ends as
    soon as there is another connection, so that the caller can repeat the request at once.
    """

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._lost: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def within(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Wait for a reply in the body, for at most `timeout_s` seconds.

        Raises ReplyLost, or the TimeoutError of nats-py. Both are also NatsErrors.
        """
        try:
            async with asyncio.timeout(timeout_s) as wait:
                self._open.add(wait)
                try:
                    yield
                finally:
                    self._open.discard(wait)
                    self._lost.discard(wait)
        except TimeoutError:
            raise (ReplyLost if wait.when() == _LOST_S else NatsTimeoutError) from None

    def on_disconnect(self) -> None:
        self._lost |= self._open

    def on_reconnect(self) -> None:
        for wait in self._lost:
            if not wait.expired():
                wait.reschedule(_LOST_S)
        self._lost.clear()
