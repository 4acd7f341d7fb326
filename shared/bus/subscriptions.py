"""Live subscriptions and responders of core NATS."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from shared.bus.stored import StoredMessage, to_stored_message
from shared.protocol.requests import TENANT_HEADER

# Limit on live messages that wait for a slow reader; it finds the dropped ones in the stream.
MAX_UNREAD_MESSAGES = 4096

Responder = Callable[[bytes, str | None], Awaitable[bytes]]
"""Maps a request and its tenant header, if there is one, to the reply."""


class LiveSubscription:
    """A subscription to messages as they are published.

    It drops messages when they are read slowly; the stream has all of them.
    """

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self._unread: asyncio.Queue[StoredMessage | None] = asyncio.Queue(MAX_UNREAD_MESSAGES)

    async def receive(self, msg: Msg) -> None:
        if "Nats-Sequence" not in (msg.headers or {}):
            # The message as it was published, which may not be stored yet.
            self.wake()
            return
        with contextlib.suppress(asyncio.QueueFull):
            self._unread.put_nowait(to_stored_message(msg))

    def wake(self) -> None:
        """Make the reader read the stream, because messages may have been missed."""
        with contextlib.suppress(asyncio.QueueFull):
            self._unread.put_nowait(None)

    async def next(self, timeout_s: float) -> StoredMessage | None:
        """Return the next message, or None after `timeout_s` without one or after `wake`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._unread.get()
        except TimeoutError:
            return None


class GroupResponder:
    """One member of a queue group, which answers its share of the requests on a subject."""

    def __init__(self, respond: Responder) -> None:
        self.subscription: Subscription | None = None
        self._respond = respond
        self._pending: set[asyncio.Task[None]] = set()

    async def receive(self, msg: Msg) -> None:
        task = asyncio.create_task(self._reply(msg))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def stop(self, timeout_s: float) -> None:
        """Leave the group, and answer the requests that have already arrived.

        Those without a reply after `timeout_s` are cancelled.
        """
        if self.subscription is not None:
            with contextlib.suppress(NatsError):
                await self.subscription.unsubscribe()
        if self._pending:
            _, late = await asyncio.wait(self._pending, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _reply(self, msg: Msg) -> None:
        # A client without a reply repeats its request.
        with contextlib.suppress(NatsError):
            tenant = (msg.headers or {}).get(TENANT_HEADER)
            await msg.respond(await self._respond(bytes(msg.data), tenant))
