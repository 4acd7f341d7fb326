"""Requests and their replies. One subscription of a connection receives all replies."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

Subscribe = Callable[[str, Callable[[Msg], None]], Awaitable[object]]
"""Function that subscribes to a subject and passes each message to another function."""


class ReplyLost(NatsTimeoutError):
    """The connection of a request was replaced before its reply came."""


class Replies:
    """Replies to one request."""

    def __init__(self) -> None:
        self._arrived: deque[Msg] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_lost = False

    def add(self, msg: Msg) -> None:
        self._arrived.append(msg)
        self._wake()

    def lose(self) -> None:
        """End the wait for a reply: the connection over which it would come was replaced."""
        self._is_lost = True
        self._wake()

    async def next(self, timeout_s: float) -> Msg:
        """Return the next reply.

        Raises ReplyLost, or the TimeoutError of nats-py. Both are also NatsErrors.
        """
        if not self._arrived and not self._is_lost:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
        if self._arrived:
            return self._arrived.popleft()
        raise ReplyLost if self._is_lost else NatsTimeoutError

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ReplyInbox:
    """Subscription for the replies to all requests of a connection.

    A reply comes over the connection of its request. When that connection is lost, a wait ends as
    soon as there is another connection, so that the caller can repeat the request at once.
    """

    def __init__(self, nc: NatsClient, subscribe: Subscribe) -> None:
        self._nc = nc
        self._subscribe = subscribe
        self._prefix = ""
        self._numbers = itertools.count()
        self._open: dict[str, Replies] = {}
        self._lost: list[Replies] = []

    @contextlib.asynccontextmanager
    async def request(self, subject: str, data: bytes) -> AsyncIterator[Replies]:
        """Publish a request, and yield the replies to it. Raises NatsError."""
        inbox, replies = await self._open_request()
        try:
            await self._nc.publish(subject, data, reply=inbox)
            yield replies
        finally:
            del self._open[inbox]

    async def ask(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Msg:
        """Publish a request, and return the first reply. Raises NatsError."""
        inbox, replies = await self._open_request()
        try:
            await self._nc.publish(subject, data, inbox, headers)
            return await replies.next(timeout_s)
        finally:
            del self._open[inbox]

    async def _open_request(self) -> tuple[str, Replies]:
        if not self._prefix:
            await self._begin()
        inbox, replies = f"{self._prefix}.{next(self._numbers)}", Replies()
        self._open[inbox] = replies
        return inbox, replies

    async def _begin(self) -> None:
        # nats-py queues the command before this task is suspended, so requests of other tasks are
        # sent after it.
        self._prefix = self._nc.new_inbox()
        try:
            await self._subscribe(f"{self._prefix}.*", self._receive)
        except NatsError:
            self._prefix = ""
            raise

    def _receive(self, msg: Msg) -> None:
        # Replies to a request that has ended are dropped.
        if (replies := self._open.get(msg.subject)) is not None:
            replies.add(msg)

    def on_disconnect(self) -> None:
        self._lost += self._open.values()

    def on_reconnect(self) -> None:
        for replies in self._lost:
            replies.lose()
        self._lost.clear()
