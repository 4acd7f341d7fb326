"""Core NATS: live subscriptions, requests and responders. None of these messages are stored."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from shared.bus.reading import StoredMessage, to_stored_message
from shared.errors import InvalidRequest
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.requests import TENANT_HEADER
from shared.protocol.versions import VERSION_HEADER, WIRE_VERSION, version_of

# Limit on live messages that wait for a slow reader. Dropped messages are in the stream.
MAX_UNREAD_MESSAGES = 4096

Responder = Callable[[bytes, str | None, str], Awaitable[bytes]]
"""Function from a request, its tenant or None, and its subject to the reply."""


class LiveSubscription:
    """Subscription to messages as they are published.

    If the reader is slow, messages are dropped. The stream has all of them.
    """

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self._unread: asyncio.Queue[StoredMessage | None] = asyncio.Queue(MAX_UNREAD_MESSAGES)

    def receive(self, msg: Msg) -> None:
        if "Nats-Sequence" not in (msg.headers or {}):
            # This is the published message, which may not be stored yet.
            self.wake()
            return
        with contextlib.suppress(asyncio.QueueFull):
            self._unread.put_nowait(to_stored_message(msg))

    def wake(self) -> None:
        """Wake the reader to read the stream, because messages may have been missed."""
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
    """Member of a queue group, which answers its share of the requests on a subject."""

    def __init__(self, nc: NatsClient, respond: Responder) -> None:
        self.subscription: Subscription | None = None
        self._nc = nc
        self._respond = respond
        self._pending = TaskSet()

    async def receive(self, msg: Msg) -> None:
        self._pending.start(self._reply(msg))

    async def stop(self, timeout_s: float) -> None:
        """Leave the group, and answer the requests that have already arrived.

        Requests without a reply after `timeout_s` are cancelled.
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
            if not _can_read(msg.headers):
                headers = {VERSION_HEADER: str(WIRE_VERSION)}
                await self._nc.publish(msg.reply, b"", headers=headers)
                return
            # The subject comes first: a tenant's client can write any header, but no other subject.
            tenant = subjects.tenant_of(msg.subject) or (msg.headers or {}).get(TENANT_HEADER)
            reply = await self._respond(bytes(msg.data), tenant, msg.subject)
            # Not `msg.respond`, which repeats the headers of the request.
            await self._nc.publish(msg.reply, reply)


def _can_read(headers: Mapping[str, str] | None) -> bool:
    try:
        return version_of(headers) <= WIRE_VERSION
    except InvalidRequest:
        return False
