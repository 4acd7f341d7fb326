"""Requests with several replies. One subscription of a connection receives all replies."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from shared.bus.waits import ReplyWaits


class Replies:
    """Replies to one request."""

    def __init__(self, waits: ReplyWaits) -> None:
        self._waits = waits
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()

    def add(self, msg: Msg) -> None:
        self._arrived.put_nowait(msg)

    async def next(self, timeout_s: float) -> Msg:
        """Return the next reply. Raises the TimeoutError of nats-py, which is also a NatsError."""
        async with self._waits.within(timeout_s):
            return await self._arrived.get()


class ReplyInbox:
    """Subscription for the replies to all requests of a connection.

    A separate subscription for each request would need two more commands to the server, and nats-py
    would start a task for each message from it.
    """

    def __init__(self, nc: NatsClient, waits: ReplyWaits) -> None:
        self._nc = nc
        self._waits = waits
        self._prefix = ""
        self._numbers = itertools.count()
        self._open: dict[str, Replies] = {}

    @contextlib.asynccontextmanager
    async def request(self, subject: str, data: bytes) -> AsyncIterator[Replies]:
        """Publish a request, and yield the replies to it. Raises NatsError."""
        if not self._prefix:
            await self._subscribe()
        inbox, replies = f"{self._prefix}.{next(self._numbers)}", Replies(self._waits)
        self._open[inbox] = replies
        try:
            await self._nc.publish(subject, data, reply=inbox)
            yield replies
        finally:
            del self._open[inbox]

    async def _subscribe(self) -> None:
        # nats-py queues the command before this task is suspended, so requests of other tasks are
        # sent after it.
        self._prefix = self._nc.new_inbox()
        try:
            await self._nc.subscribe(f"{self._prefix}.*", cb=self._receive)
        except NatsError:
            self._prefix = ""
            raise

    async def _receive(self, msg: Msg) -> None:
        # Replies to a request that has ended are dropped.
        if (replies := self._open.get(msg.subject)) is not None:
            replies.add(msg)
