"""Core NATS: live subscriptions, requests and responders. None of these messages are stored."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

from shared.bus.connection import BROKER_DEADLINE_S, FIRST_RETRY_S, BusPart
from shared.bus.reading import StoredMessage, to_stored_message
from shared.errors import InvalidRequest, Unavailable, UnsupportedVersion
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.requests import TENANT_HEADER, tenant_header
from shared.protocol.versions import (
    OLDEST_VERSION,
    VERSION_HEADER,
    WIRE_VERSION,
    version_header,
    version_of,
)

# A lost connection loses the flush, too. nats-py accepts only whole seconds.
FLUSH_TIMEOUT_S = 1
# Limit on live messages that wait for a slow reader; it finds the dropped ones in the stream.
MAX_UNREAD_MESSAGES = 4096

Responder = Callable[[bytes, str | None], Awaitable[bytes]]
"""Maps a request and its tenant, if one is named, to the reply."""


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

    def __init__(self, nc: NatsClient, respond: Responder) -> None:
        self.subscription: Subscription | None = None
        self._nc = nc
        self._respond = respond
        self._pending = TaskSet()

    async def receive(self, msg: Msg) -> None:
        self._pending.start(self._reply(msg))

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
            if not _can_read(msg.headers):
                headers = {VERSION_HEADER: str(WIRE_VERSION)}
                await self._nc.publish(msg.reply, b"", headers=headers)
                return
            # A tenant's client may write any header, and no other subject.
            tenant = subjects.tenant_of(msg.subject) or (msg.headers or {}).get(TENANT_HEADER)
            # Not `msg.respond`, which repeats the headers of the request.
            await self._nc.publish(msg.reply, await self._respond(bytes(msg.data), tenant))


def _can_read(headers: Mapping[str, str] | None) -> bool:
    try:
        return version_of(headers) <= WIRE_VERSION
    except InvalidRequest:
        return False


class Messenger(BusPart):
    """The part of `Bus` for messages that are not stored."""

    def __init__(self, nc: NatsClient) -> None:
        super().__init__(nc)
        self._live: set[LiveSubscription] = set()

    # -- subscriptions --------------------------------------------------------------------------

    async def subscribe(self, subject: str) -> LiveSubscription:
        """Subscribe to `subject`. Return once the server has registered the subscription.

        Raises Unavailable when the broker does not answer until BROKER_DEADLINE_S.
        """
        live = LiveSubscription()
        live.subscription = await self._nc.subscribe(subject, cb=live.receive)
        self._live.add(live)
        try:
            await self._flush()
        except BaseException:
            await self.unsubscribe(live)
            raise
        return live

    async def unsubscribe(self, live: LiveSubscription) -> None:
        """End a subscription. A second call does nothing."""
        self._live.discard(live)
        if live.subscription is not None:
            with contextlib.suppress(NatsError):
                await live.subscription.unsubscribe()

    async def watch_subjects(
        self, subject: str, callback: Callable[[str], None]
    ) -> Callable[[], Awaitable[None]]:
        """Call `callback` with the subject of every further message that `subject` matches.

        Return a function that ends this.
        """

        async def receive(msg: Msg) -> None:
            callback(msg.subject)

        subscription = await self._nc.subscribe(subject, cb=receive)
        await self._flush()

        async def end() -> None:
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()

        return end

    # -- requests and replies -------------------------------------------------------------------

    async def request(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        tenant: str = "",
        version: int = OLDEST_VERSION,
    ) -> bytes:
        """Return the reply of a responder on `subject`, which has to read `version`.

        Raises TimeoutError, Unavailable at once when there is no responder, and UnsupportedVersion
        when an older one has got the request.
        """
        headers = (tenant_header(tenant) | version_header(version)) or None
        try:
            msg = await self._nc.request(subject, data, timeout=timeout_s, headers=headers)
        except NatsTimeoutError as error:
            raise TimeoutError from error
        except NatsError as error:
            raise Unavailable(f"no responder on {subject}") from error
        # A worker from before these versions repeats the header.
        if VERSION_HEADER in (msg.headers or {}):
            refusal = UnsupportedVersion(
                f"this call has version {version}, which a worker cannot read"
            )
            refusal.reported = True
            raise refusal
        return bytes(msg.data)

    async def request_many(
        self, subject: str, accept: Callable[[bytes], bool], timeout_s: float
    ) -> None:
        """Pass the replies of all responders on `subject` to `accept`, until it returns True or the
        time is over.

        Raises Unavailable without a connection.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._replies.request(subject, b"") as replies,
            ):
                done = False
                while not done:
                    msg = await replies.next(timeout_s)
                    no_responders = (msg.headers or {}).get("Status") == "503"
                    done = no_responders or accept(bytes(msg.data))
        except TimeoutError:
            pass
        except NatsError as error:
            raise Unavailable(f"requests on {subject} cannot be sent: {error}") from error

    async def add_responder(self, subject: str, respond: Callable[[bytes], bytes]) -> None:
        """Reply to every further request on `subject`."""

        async def receive(msg: Msg) -> None:
            await msg.respond(respond(msg.data))

        await self._nc.subscribe(subject, cb=receive)
        await self._flush()

    async def add_group_responder(
        self, subject: str, group: str, respond: Responder
    ) -> GroupResponder:
        """Join the queue group `group`, whose members share the requests on `subject`.

        Requests are answered concurrently. `respond` must not raise.
        """
        responder = GroupResponder(self._nc, respond)
        responder.subscription = await self._nc.subscribe(subject, group, cb=responder.receive)
        await self._flush()
        return responder

    async def _flush(self) -> None:
        """Return once the server has received all that was sent. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BROKER_DEADLINE_S
        while True:
            try:
                # The timeout is short, because a pong that is lost with the connection never comes,
                # while the next connection restores the subscriptions by itself.
                await self._nc.flush(timeout=FLUSH_TIMEOUT_S)
                return
            except (NatsError, OSError, RuntimeError) as error:
                # nats-py also writes to a connection that it does not yet know to be lost.
                if loop.time() > deadline or self._nc.is_closed:
                    raise Unavailable(f"the broker does not answer: {error}") from error
            await asyncio.sleep(FIRST_RETRY_S)
