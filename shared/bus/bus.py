"""The connection to the broker: publishing, reading and live messages, and its named parts.

This package handles delivery. It does not know the content of messages or the logic of stages.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from weakref import WeakValueDictionary

import msgspec
import structlog
from msgspec import Struct
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import NotFoundError

from shared.bus.connection import (
    BROKER_DEADLINE_S,
    FIRST_RETRY_S,
    REPLY_TIMEOUT_S,
    Connection,
    connect,
    local_address,
    retry_until,
)
from shared.bus.consumer import AckBatcher
from shared.bus.figures import StreamFigures
from shared.bus.heartbeats import Heartbeats
from shared.bus.login import Login
from shared.bus.messaging import GroupResponder, LiveSubscription, Responder
from shared.bus.queues import Queues
from shared.bus.reading import STALE_READ_S, StoredMessage, answered, direct_get
from shared.bus.replies import ReplyLost
from shared.bus.stream_keeper import StreamKeeper
from shared.errors import Fenced, Overloaded, PayloadTooLarge, Unavailable, UnsupportedVersion
from shared.protocol.requests import tenant_header
from shared.protocol.versions import OLDEST_VERSION, VERSION_HEADER, version_header

WILDCARDS = ("", "0.0.0.0", "::")

# A flush is lost together with its connection. nats-py accepts only whole seconds.
FLUSH_TIMEOUT_S = 1
# Server error codes (nats-server's errors.json) for a sequence without a message.
_NO_SUCH_MESSAGE = (10043, 10057)

READ_BATCH = 256
READ_BATCH_BYTES = 4 * 2**20
# The headers share the server's limit with the payload.
HEADER_BYTES = 1024

# Server error codes (nats-server's errors.json).
_WRONG_LAST_SEQUENCE = 10071
_STORE_FAILED = 10077

_log = structlog.get_logger()


class _PublishError(Struct):
    err_code: int = 0
    description: str = ""


class _PublishAck(Struct):
    """Reply of a stream to a message."""

    seq: int = 0
    duplicate: bool = False
    error: _PublishError | None = None


_decode_ack = msgspec.json.Decoder(_PublishAck).decode


class Bus:
    """A connection to the broker that reconnects forever."""

    def __init__(self, connection: Connection, *, creates_streams: bool = True) -> None:
        self.connection = connection
        self._nc, self._js = connection.nc, connection.js
        self.streams = StreamKeeper(connection, creates_streams=creates_streams)
        self.queues = Queues(connection, self.streams)
        self.figures = StreamFigures(connection, self.read_next)
        self.heartbeats = Heartbeats(self)
        self._acks: WeakValueDictionary[str, AckBatcher] = WeakValueDictionary()
        """Acknowledgements of other workers' deliveries that are being sent, by consumer."""
        self._live: set[LiveSubscription] = set()
        self._closing = False

    @classmethod
    async def connect(cls, server: Login | str, name: str, timeout_s: float = 10.0) -> "Bus":
        """Connect to a server; a URL alone stands for `Login.of_operator`.

        Raises Unavailable when no server answers within `timeout_s`, or when it refuses the login.
        """
        bus: Bus | None = None
        login = server if isinstance(server, Login) else Login.of_operator(server)
        url = str(login)

        async def on_disconnect() -> None:
            if bus is not None and not bus._closing:
                _log.warning("broker_disconnected", url=url)

        async def on_reconnect() -> None:
            if bus is not None:
                _log.info("broker_reconnected", url=url)
                bus._on_reconnect()

        nc = await connect(login, name, timeout_s, on_disconnect, on_reconnect)
        bus = cls(Connection(nc), creates_streams=login.creates_streams)
        try:
            # A server that loads other keys may close a connection that it has just accepted.
            await retry_until(timeout_s, bus._begin, (Unavailable,), url, FIRST_RETRY_S)
        except Unavailable:
            await bus.close()
            raise
        return bus

    async def _begin(self) -> None:
        await self.connection.check_jetstream()
        await self.connection.sync_clock()

    def _on_reconnect(self) -> None:
        self.queues.on_reconnect()
        # Messages may have been published in the meantime.
        for live in self._live:
            live.wake()

    async def close(self) -> None:
        """Stop the consumers and close the connection."""
        self._closing = True
        await self.queues.close()
        # Without a server there is no peer to say goodbye to.
        with contextlib.suppress(NatsError, OSError, RuntimeError):
            await self._nc.flush(timeout=2)
        with contextlib.suppress(NatsError, OSError, RuntimeError):
            await self._nc.close()

    def now_ms(self) -> float:
        """Return the time of the broker's clock in Unix milliseconds."""
        return self.connection.now_ms()

    @property
    def is_connected(self) -> bool:
        return self._nc.is_connected

    def address_of(self, listen: str) -> str:
        """Return the address at which other machines reach a listener on `listen`.

        For a wildcard, it is the local address of this connection, which other workers can reach.
        """
        return local_address(self._nc) if listen in WILDCARDS else listen

    # -- publishing -----------------------------------------------------------------------------

    @property
    def max_payload(self) -> int:
        """Maximum number of bytes of one message."""
        return self._nc.max_payload

    def check_size(self, data: bytes, subject: str) -> None:
        """Raise PayloadTooLarge if `data` does not fit into one message."""
        limit = self.max_payload - HEADER_BYTES
        if len(data) > limit:
            error = PayloadTooLarge(
                f"the message for {subject} has {len(data)} bytes, the limit is {limit}:"
                " send fewer or smaller media",
                field="messages",
            )
            error.reported = True
            raise error

    async def publish(self, subject: str, data: bytes, msg_id: str, tenant: str = "") -> bool:
        """Store `data` once. Return True if a message with this id was stored before.

        A message without an ack may still be stored, so it is published again with the same id.
        Unavailable is raised after BROKER_DEADLINE_S.
        """
        self.check_size(data, subject)
        headers = {"Nats-Msg-Id": msg_id} | tenant_header(tenant)
        ack = await self._publish(subject, data, headers)
        return ack is None or ack.duplicate

    async def publish_without_id(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Store `data`, possibly twice if the broker fails meanwhile.

        A stream with a limit on the messages of a subject stores it once.
        """
        self.check_size(data, subject)
        await self._publish(subject, data, headers or {})

    async def append(
        self,
        subject: str,
        data: bytes,
        last_sequence: int,
        ttl_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Store `data` if `last_sequence` is still the last sequence of its subject.

        Return the sequence of `data`. It expires after `ttl_s`, or at the maximum age of its
        stream. Raises Fenced if another writer has appended before.
        """
        self.check_size(data, subject)
        fence = {"Nats-Expected-Last-Subject-Sequence": str(last_sequence)} | dict(headers or {})
        if ttl_s is not None:
            fence["Nats-TTL"] = f"{max(1, round(ttl_s))}s"
        ack = await self._publish(subject, data, fence)
        assert ack is not None, "a stream of logs has no limit on messages per subject"
        return ack.seq

    async def notify(self, subject: str) -> None:
        """Publish an empty message to current subscribers. It is not stored and may be lost."""
        with contextlib.suppress(NatsError):
            await self._nc.publish(subject, b"")

    async def acknowledge(self, receipt: str) -> bool:
        """Acknowledge another worker's delivery. Return whether the server has confirmed it."""
        # The name of the consumer is before the last tokens, which differ between deliveries.
        consumer = receipt.rsplit(".", 5)[0]
        return await self._acks.setdefault(consumer, AckBatcher(self._nc)).send(receipt)

    async def _publish(
        self, subject: str, data: bytes, headers: dict[str, str]
    ) -> _PublishAck | None:
        """Return the ack, or None if the stream has a message of this subject and accepts no other.

        Raises Fenced, Overloaded, or Unavailable after BROKER_DEADLINE_S.
        """

        async def attempt() -> _PublishAck | None:
            try:
                reply = await self._nc.request(subject, data, REPLY_TIMEOUT_S, headers=headers)
            except NoRespondersError:
                self.queues.check()
                raise
            ack = _decode_ack(reply.data)
            if ack.error is None:
                return ack
            code, reason = ack.error.err_code, ack.error.description
            if code == _WRONG_LAST_SEQUENCE:
                raise Fenced(f"another writer appended to {subject}: {reason}")
            if code == _STORE_FAILED and "per subject" in reason:
                return None
            if code == _STORE_FAILED and "maximum" in reason:
                raise Overloaded(
                    f"the queue of {subject} is full ({reason});"
                    f" try again in {Overloaded.retry_after_s:g} s"
                )
            raise NatsError(reason)

        # All other failures are temporary: no reply, no leader, no room, or, in a cluster, a store
        # of the same message or its predecessor that has not ended.
        return await retry_until(
            BROKER_DEADLINE_S,
            attempt,
            (NatsError,),
            "the broker did not store a message",
            FIRST_RETRY_S,
        )

    # -- reading and removing -------------------------------------------------------------------

    async def read(
        self, stream: str, subject: str, first: int = 1, max_bytes: int | None = None
    ) -> list[StoredMessage]:
        """Return the messages of `subject` from sequence `first` on, oldest first.

        Raises PayloadTooLarge as soon as they exceed `max_bytes`, and Unavailable if the broker
        does not answer within BROKER_DEADLINE_S.
        """
        messages: list[StoredMessage] = []
        num_bytes = 0
        async for message in self.read_forwards(stream, subject, first):
            messages.append(message)
            num_bytes += len(message.data)
            if max_bytes is not None and num_bytes > max_bytes:
                raise PayloadTooLarge(f"{subject} has more than {max_bytes} bytes")
        return messages

    async def read_forwards(
        self, stream: str, subject: str, first: int = 1
    ) -> AsyncIterator[StoredMessage]:
        """Yield the messages of `subject` from sequence `first` on, oldest first.

        They are read as they are used. Raises Unavailable.
        """
        more = True
        while more:
            batch, more = await self.read_batch(stream, subject, first)
            for message in batch:
                yield message
                first = message.sequence + 1

    async def read_batch(
        self,
        stream: str,
        subject: str,
        first: int,
        max_bytes: int = READ_BATCH_BYTES,
        max_messages: int = READ_BATCH,
    ) -> tuple[list[StoredMessage], bool]:
        """Return messages of `subject` from sequence `first` on, and whether more follow.

        The broker ends the batch at about `max_bytes`, but not before the first message.
        """
        query = {
            "seq": first,
            "next_by_subj": subject,
            "batch": max_messages,
            "max_bytes": max_bytes,
        }
        return await direct_get(self.connection, stream, query)

    async def read_backwards(
        self, stream: str, subject: str, end: int | None = None
    ) -> AsyncIterator[StoredMessage]:
        """Yield the messages of `subject` before sequence `end`, the newest first.

        A broker reads only forwards. So this reads sections of the stream, which become longer if
        they have few of the messages, and shorter if they have more than fit into one batch. Raises
        Unavailable.
        """
        first, last = await self.figures.sequence_range(stream)
        end, length = last + 1 if end is None else end, READ_BATCH
        while end > first:
            start = max(first, end - length)
            batch, has_more = await self.read_batch(stream, subject, start)
            if has_more and batch[-1].sequence < end and end - start > 1:
                length = (end - start) // 2
                continue
            for message in reversed(batch):
                if message.sequence < end:
                    yield message
            end, length = start, 2 * length

    async def first_since(self, stream: str, subject: str, time_ms: float) -> int | None:
        """Return the sequence of the first message of `subject` that was stored since a time.

        The time is in Unix milliseconds of the broker's clock. Raises Unavailable.
        """
        start_time = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()
        query = {"start_time": start_time, "next_by_subj": subject, "batch": 1}
        messages, _ = await direct_get(self.connection, stream, query)
        return messages[0].sequence if messages else None

    async def read_last(self, stream: str, subject: str) -> StoredMessage | None:
        """Return the latest message of `subject`, which may have wildcards."""
        messages, _ = await direct_get(self.connection, stream, {"last_by_subj": subject})
        return messages[0] if messages else None

    async def wait_for_replicas(self, lag_s: float = STALE_READ_S) -> None:
        """Wait for the time by which a replica may lag. A server that runs alone has no replica."""
        if not self.connection.is_alone:
            await asyncio.sleep(lag_s)

    async def repeat_last(self, stream: str, subject: str) -> None:
        """Make the broker send the latest message of `subject` to its current subscribers.

        The subject is the reply subject of a read, so no worker needs a permission to publish to
        it. The message is not stored again, and may be lost.
        """
        query = json.dumps({"last_by_subj": subject}).encode()
        with contextlib.suppress(NatsError):
            await self._nc.publish(f"$JS.API.DIRECT.GET.{stream}", query, reply=subject)

    async def has_messages(self, stream: str, subject: str) -> bool:
        """Return whether `subject` has messages, according to the leader of the stream.

        Other replicas, which serve reads, may lag. Raises Unavailable.
        """
        try:
            await self._js.get_last_msg(stream, subject)
        except NotFoundError:
            return False
        except NatsError as error:
            raise Unavailable(f"the broker did not answer a read of {stream}") from error
        return True

    async def read_next(
        self, stream: str, sequence: int, subject: str = ">"
    ) -> StoredMessage | None:
        """Return the message at `sequence`, or the next message if it was removed."""
        query: dict[str, object] = {"seq": sequence, "next_by_subj": subject}
        messages, _ = await direct_get(self.connection, stream, query)
        return messages[0] if messages else None

    async def purge(self, stream: str, subject: str, keep: int | None = None) -> None:
        """Remove all messages of `subject`, except for the newest ones if `keep` is their number.

        Messages of work queues must be removed with `delete` instead: after a purge, nats-server
        2.15.1 counts messages of other subjects as acknowledged if they were delivered before a
        purged message.
        """
        try:
            await self._js.purge_stream(stream, subject=subject, keep=keep)
        except NatsError as error:
            raise Unavailable(f"the broker did not purge {subject}: {error}") from error

    async def delete(self, stream: str, sequence: int) -> None:
        """Remove one message, if it exists.

        Raises Unavailable.
        """
        # nats-py does not support `no_erase`. Without it, the server overwrites the bytes on disk.
        query = json.dumps({"seq": sequence, "no_erase": True}).encode()
        subject, failed = f"$JS.API.STREAM.MSG.DELETE.{stream}", f"a message of {stream}"
        removing = self._nc.request(subject, query, timeout=REPLY_TIMEOUT_S)
        reply = json.loads((await answered(removing, failed)).data)
        if reply.get("error", {}).get("err_code") not in (None, *_NO_SUCH_MESSAGE):
            raise Unavailable(f"the broker did not remove {failed}: {reply['error']}")

    # -- subscriptions --------------------------------------------------------------------------

    async def subscribe(self, subject: str) -> LiveSubscription:
        """Subscribe to `subject`.

        The server registers the subscription before it receives any later message or request of
        this connection. So a caller that reads a stream afterwards misses no message.
        """
        live = LiveSubscription()
        live.subscription = await self._nc.subscribe_direct(subject, live.receive)
        self._live.add(live)
        return live

    async def unsubscribe(self, live: LiveSubscription) -> None:
        """End a subscription. A second call does nothing."""
        self._live.discard(live)
        if live.subscription is not None:
            with contextlib.suppress(NatsError):
                await live.subscription.unsubscribe()

    async def watch_subjects(
        self, subject: str | Iterable[str], callback: Callable[[str], None]
    ) -> Callable[[], Awaitable[None]]:
        """Call `callback` with the subject of every further message that `subject` matches.

        With several subjects, each message may match one of them.
        Return a function that ends the watch.
        """

        def receive(msg: Msg) -> None:
            callback(msg.subject)

        filters = (subject,) if isinstance(subject, str) else subject
        subscriptions = [await self._nc.subscribe_direct(name, receive) for name in filters]
        await self._flush()

        async def end() -> None:
            with contextlib.suppress(NatsError):
                for subscription in subscriptions:
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
        """Return the reply of a responder on `subject` that reads `version`.

        The request is sent again if its connection is lost. Raises TimeoutError, Unavailable at
        once if there is no responder, and UnsupportedVersion if an older responder has received
        the request.
        """
        headers = (tenant_header(tenant) | version_header(version)) or None
        loop = asyncio.get_running_loop()
        deadline_s, msg = loop.time() + timeout_s, None
        while msg is None:
            left_s = deadline_s - loop.time()
            try:
                msg = await self._nc.request(subject, data, timeout=left_s, headers=headers)
            except ReplyLost:
                continue
            except NatsTimeoutError as error:
                raise TimeoutError from error
            except NatsError as error:
                raise Unavailable(f"no responder on {subject}") from error
        # A worker without support for versions repeats the header.
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
        """Pass the replies of all responders on `subject` to `accept`.

        Return when `accept` returns True, or after the timeout. Raises Unavailable without a
        connection.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.connection.inbox.request(subject, b"") as replies,
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
        """Join the queue group `group`. Its members share the requests on `subject`.

        Requests are answered concurrently. `respond` must not raise.
        """
        responder = GroupResponder(self._nc, respond)
        responder.subscription = await self._nc.subscribe(subject, group, cb=responder.receive)
        await self._flush()
        return responder

    async def _flush(self) -> None:
        """Return once the server has received all sent messages. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BROKER_DEADLINE_S
        while True:
            try:
                # The timeout is short, because a pong that is lost with the connection never
                # arrives, while the next connection restores the subscriptions.
                await self._nc.flush(timeout=FLUSH_TIMEOUT_S)
                return
            except (NatsError, OSError, RuntimeError) as error:
                # nats-py also writes to a lost connection until it notices the loss.
                if loop.time() > deadline or self._nc.is_closed:
                    raise Unavailable(f"the broker does not answer: {error}") from error
            await asyncio.sleep(FIRST_RETRY_S)
