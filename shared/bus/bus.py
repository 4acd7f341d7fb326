"""The connection to the broker: publish with an ack, fenced append, read, listen; and consumers.

What it knows is delivery. What the bytes mean, and what a stage does with them, it does not know.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import structlog
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from shared.bus import streams
from shared.bus.connection import ANSWER_TIMEOUT_S, connect, next_of
from shared.bus.consumer import Consumer, acknowledge
from shared.bus.queue_depth import ConsumerQueue, QueueDepth
from shared.bus.stored import ReadFailed, StoredMessage, collect_replies
from shared.bus.subscriptions import GroupResponder, LiveSubscription, Responder
from shared.config import DeliveryConfig, NatsConfig
from shared.errors import (
    Fenced,
    NotFound,
    Overloaded,
    PagemillError,
    PayloadTooLarge,
    Unavailable,
)
from shared.protocol import subjects
from shared.protocol.messages import TENANT_HEADER, tenant_header

# Lost with a connection; the library takes whole seconds.
FLUSH_TIMEOUT_S = 1
# A leader election of a replicated stream takes 4 to 7 seconds, in which publishes are refused.
PUBLISH_DEADLINE_S = 15.0
# A disk that has much else to write was seen to take 11 seconds for the files of one stream.
PREPARE_DEADLINE_S = 60.0
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0

READ_BATCH = 256

# Of a worker whose heartbeat comes every second.
DEAD_AFTER_S = 3.0

# Server error codes (nats-server's errors.json).
_WRONG_LAST_SEQUENCE = 10071
_STORE_FAILED = 10077

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """What a client has published; `tenant` as it was written there, "" without one."""

    data: bytes
    tenant: str


class Bus:
    """A connection to the broker, which reconnects for ever."""

    def __init__(self, nc: NatsClient) -> None:
        self._nc = nc
        self._js: JetStreamContext = nc.jetstream(timeout=ANSWER_TIMEOUT_S)
        self._consumers: list[Consumer] = []
        self._listeners: set[LiveSubscription] = set()
        self._volatile: list[api.StreamConfig] = []
        self._clock_offset_ms = 0.0
        self._reviving: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def connect(cls, url: str, name: str, timeout_s: float = 10.0) -> "Bus":
        """`url` may name several servers of one cluster, with commas between.

        Raises Unavailable when none of them answers within `timeout_s`.
        """
        bus: Bus | None = None

        async def disconnected() -> None:
            if bus is not None and not bus._closing:
                _log.warning("broker_lost", url=url)

        async def reconnected() -> None:
            if bus is not None:
                _log.info("broker_found", url=url)
                bus._resume()

        try:
            nc = await connect(url, name, timeout_s, disconnected, reconnected)
        except (TimeoutError, OSError, NatsError) as error:
            raise Unavailable(f"no nats-server answers at {url}") from error
        bus = cls(nc)
        try:
            await bus.sync_clock()
        except Unavailable:
            await bus.close()
            raise
        return bus

    def _resume(self) -> None:
        """After a reconnect: ask again for what the server has forgotten or could not send."""
        for consumer in self._consumers:
            consumer.reconnected()
        for listener in self._listeners:
            listener.wake()
        if self._volatile and (self._reviving is None or self._reviving.done()):
            self._reviving = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        # A broker that runs alone comes back without its streams in memory.
        while not self._closing:
            try:
                await streams.ensure(self._nc, self._volatile)
                return
            except (NatsError, PagemillError) as error:
                _log.warning("streams_not_revived", error=str(error) or type(error).__name__)
            await asyncio.sleep(MAX_RETRY_S)

    # -- the one clock ------------------------------------------------------------------------

    async def sync_clock(self) -> None:
        """Take the broker's time: clocks of workers may differ by hours, and deadlines must not.

        Raises Unavailable when the broker does not answer.
        """
        loop = asyncio.get_running_loop()
        sent = loop.time()
        try:
            answer = await self._nc.request("$SYS.REQ.USER.INFO", b"", timeout=ANSWER_TIMEOUT_S)
        except NatsError as error:
            raise Unavailable(f"the broker does not tell its time: {error}") from error
        half_way = (sent + loop.time()) / 2
        told = datetime.fromisoformat(json.loads(answer.data)["server"]["time"])
        self._clock_offset_ms = 1000 * (told.timestamp() - half_way)

    def now_ms(self) -> float:
        """Unix milliseconds of the broker's clock."""
        return self.to_broker_ms(asyncio.get_running_loop().time())

    def to_broker_ms(self, monotonic_s: float) -> float:
        """What the broker's clock shows when this machine's monotonic clock shows that."""
        return 1000 * monotonic_s + self._clock_offset_ms

    @property
    def max_payload(self) -> int:
        """Bytes that one message may have."""
        return self._nc.max_payload

    async def close(self) -> None:
        self._closing = True
        for consumer in self._consumers:
            await consumer.stop()
        # Without a server there is nobody to take leave of.
        with contextlib.suppress(NatsError, OSError, RuntimeError):
            await self._nc.flush(timeout=2)
        with contextlib.suppress(NatsError, OSError, RuntimeError):
            await self._nc.close()

    # -- streams ----------------------------------------------------------------------------

    async def prepare(self, nats: NatsConfig, delivery: DeliveryConfig) -> None:
        """Check the server and create what is missing in it.

        Raises ConfigError when the promises would not hold here, Unavailable when it is away.
        """
        self._volatile = streams.volatile_streams(delivery, nats.replicas)
        configs = streams.durable_streams(delivery, nats.replicas) + self._volatile
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PREPARE_DEADLINE_S
        while True:
            try:
                await streams.check_server(self._nc, nats)
                await streams.ensure(self._nc, configs)
                return
            except (NatsError, Unavailable) as error:
                # A cluster that has just come up, or has lost its leader, answers a little later.
                if loop.time() + MAX_RETRY_S > deadline:
                    raise Unavailable(f"the broker has no streams for us: {error}") from error
            await asyncio.sleep(MAX_RETRY_S)

    # -- publishing -------------------------------------------------------------------------

    async def publish(self, subject: str, data: bytes, msg_id: str, tenant: str = "") -> bool:
        """Store `data` once; returns whether a message with this id had been stored before.

        An attempt whose ack does not come may have been stored all the same: it is repeated under
        the same id until PUBLISH_DEADLINE_S, then Unavailable is raised.
        """
        self.check_size(data, subject)
        headers = {"Nats-Msg-Id": msg_id} | tenant_header(tenant)
        ack = await self._publish(subject, data, headers)
        return ack is None or bool(ack.duplicate)

    async def append(self, subject: str, data: bytes, last_sequence: int) -> int:
        """Store `data` if `last_sequence` is still the last of its subject; returns its sequence.

        Raises Fenced when another writer came first.
        """
        self.check_size(data, subject)
        header = {"Nats-Expected-Last-Subject-Sequence": str(last_sequence)}
        ack = await self._publish(subject, data, header)
        assert ack is not None, "logs have no limit on a subject"
        return ack.seq

    def check_size(self, data: bytes, what: str) -> None:
        """Raises PayloadTooLarge; the headers share the server's limit with the payload."""
        limit = self.max_payload - 1024
        if len(data) > limit:
            raise PayloadTooLarge(
                f"the message for {what} has {len(data)} bytes, the limit is {limit}:"
                " send fewer or smaller pictures",
                field="messages",
            )

    async def publish_without_id(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Store `data`, perhaps twice if the broker fails meanwhile."""
        self.check_size(data, subject)
        await self._publish(subject, data, headers or {})

    async def notify(self, subject: str) -> None:
        """A hint to whoever listens just now; nothing may depend on its arrival."""
        with contextlib.suppress(NatsError):
            await self._nc.publish(subject, b"")

    async def acknowledge(self, receipt: str) -> bool:
        """Acknowledge somebody else's delivery; returns whether the server has confirmed it."""
        return await acknowledge(self._nc, receipt)

    async def _publish(
        self, subject: str, data: bytes, headers: dict[str, str]
    ) -> api.PubAck | None:
        """None: the stream has a message of this subject, and takes no second one.

        Raises Fenced, Overloaded, or Unavailable after PUBLISH_DEADLINE_S.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUBLISH_DEADLINE_S
        pause = FIRST_RETRY_S
        while True:
            try:
                return await self._js.publish(subject, data, headers=headers)
            except NatsError as error:
                code = error.err_code if isinstance(error, APIError) else None
                reason = error.description or "" if isinstance(error, APIError) else ""
                if code == _WRONG_LAST_SEQUENCE:
                    raise Fenced(f"{subject} has moved on: {reason}") from error
                if code == _STORE_FAILED and "per subject" in reason:
                    return None
                if code == _STORE_FAILED and "maximum" in reason:
                    raise Overloaded(
                        f"the queue of {subject} is full ({reason});"
                        f" try again in {Overloaded.retry_after_s:g} s"
                    ) from error
                # All else passes: no answer, no leader, no room, or (in a cluster) the same message
                # or its predecessor being stored just now.
                if loop.time() + pause > deadline:
                    raise Unavailable(f"the broker did not store a message: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_S)

    # -- consuming and reading --------------------------------------------------------------

    async def consume(
        self, stream: str, durable: str, subject: str, capacity: int, ack_wait_s: float
    ) -> Consumer:
        """A share in the durable consumer `durable`, which is made if it does not exist.

        Raises Unavailable when the broker does not answer until PUBLISH_DEADLINE_S.
        """
        config = api.ConsumerConfig(
            durable_name=durable,
            filter_subject=subject,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            # Attempts are counted by the workers, which can write a dead letter; the server would
            # leave the message in the queue for ever without a word.
            max_deliver=-1,
            # Credit bounds what each worker holds; a common bound would let one worker that holds
            # many starve the others.
            max_ack_pending=-1,
        )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUBLISH_DEADLINE_S
        while True:
            try:
                await self._js.add_consumer(stream, config)
                break
            except NatsError as error:
                if loop.time() + MAX_RETRY_S > deadline:
                    raise Unavailable(f"no consumer {durable}: {error}") from error
            await asyncio.sleep(MAX_RETRY_S)
        consumer = Consumer(self._nc, stream, durable, capacity)
        self._consumers.append(consumer)
        await consumer.start()
        return consumer

    async def read(self, stream: str, subject: str, first: int = 1) -> list[StoredMessage]:
        """The messages of `subject` from sequence `first` on, oldest first.

        Raises Unavailable when the broker does not answer until PUBLISH_DEADLINE_S.
        """
        found: list[StoredMessage] = []
        more = True
        while more:
            request = {
                "seq": found[-1].sequence + 1 if found else first,
                "next_by_subj": subject,
                "batch": READ_BATCH,
            }
            batch, more = await self._get_directly(stream, request)
            found += batch
        return found

    async def read_last(self, stream: str, subject: str) -> StoredMessage | None:
        """The latest message of `subject`, which may have wildcards."""
        found, _ = await self._get_directly(stream, {"last_by_subj": subject})
        return found[0] if found else None

    async def read_next(
        self, stream: str, sequence: int, subject: str = ">"
    ) -> StoredMessage | None:
        """The message at or, where it is gone, the first one after `sequence`."""
        found, _ = await self._get_directly(stream, {"seq": sequence, "next_by_subj": subject})
        return found[0] if found else None

    async def _get_directly(
        self, stream: str, request: dict[str, object]
    ) -> tuple[list[StoredMessage], bool]:
        """What a direct get answers, and whether there is more after it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUBLISH_DEADLINE_S
        while True:
            inbox = self._nc.new_inbox()
            subscription = await self._nc.subscribe(inbox)
            try:
                subject = f"$JS.API.DIRECT.GET.{stream}"
                await self._nc.publish(subject, json.dumps(request).encode(), reply=inbox)
                return await collect_replies(subscription, batched="batch" in request)
            except (NatsError, ReadFailed) as error:
                if loop.time() + MAX_RETRY_S > deadline:
                    raise Unavailable(f"the broker did not answer a read of {stream}") from error
            finally:
                with contextlib.suppress(NatsError):
                    await subscription.unsubscribe()
            await asyncio.sleep(MAX_RETRY_S)

    async def get_queued_request(self, sequence: int) -> "QueuedRequest | None":
        """A client's request that has not ended; None if it is not there any more."""
        try:
            found = await self._js.get_msg(subjects.REQUESTS_STREAM, sequence)
        except NotFoundError:
            return None
        except NatsError as error:
            raise Unavailable(f"the broker does not tell of request {sequence}") from error
        return QueuedRequest(found.data or b"", (found.headers or {}).get(TENANT_HEADER, ""))

    async def sequence_range(self, stream: str) -> tuple[int, int]:
        """First and last sequence of a stream."""
        try:
            state = (await self._js.stream_info(stream)).state
        except NatsError as error:
            raise Unavailable(f"the broker does not tell of stream {stream}: {error}") from error
        return state.first_seq, state.last_seq

    async def queue_depth(self, stream: str, durable: str) -> QueueDepth:
        """How a queue stands with its consumer. Raises NotFound if there is no such consumer."""
        try:
            info = await self._js.consumer_info(stream, durable)
        except NotFoundError as error:
            raise NotFound(f"no worker has ever asked for {durable}") from error
        except NatsError as error:
            raise Unavailable(f"the broker does not tell of consumer {durable}") from error
        return QueueDepth.of(info)

    async def queue_depths(self, stream: str) -> list[ConsumerQueue]:
        """How all consumers of a stream stand."""
        found: list[ConsumerQueue] = []
        try:
            while page := await self._js.consumers_info(stream, offset=len(found)):
                found += [ConsumerQueue.of(info) for info in page]
        except NatsError as error:
            raise Unavailable(f"the broker does not tell of stream {stream}: {error}") from error
        return found

    async def stream_size(self, stream: str) -> tuple[int, float | None]:
        """How many messages a stream has, and when the oldest was stored: Unix milliseconds."""
        try:
            # The library leaves out the time.
            subject = f"$JS.API.STREAM.INFO.{stream}"
            answer = await self._nc.request(subject, b"", timeout=ANSWER_TIMEOUT_S)
            state = json.loads(answer.data)["state"]
        except NatsError as error:
            raise Unavailable(f"the broker does not tell of stream {stream}: {error}") from error
        except KeyError as error:
            raise Unavailable(f"the broker has no stream {stream}: nobody serves there") from error
        first_ms = 1000 * datetime.fromisoformat(state["first_ts"]).timestamp()
        return state["messages"], first_ms if state["messages"] else None

    async def purge(self, stream: str, subject: str) -> None:
        """Remove all messages of `subject`."""
        try:
            await self._js.purge_stream(stream, subject=subject)
        except NatsError as error:
            raise Unavailable(f"the broker did not purge {subject}: {error}") from error

    async def delete(self, stream: str, sequence: int) -> None:
        """Remove one message; one that is not there any more is forgotten already."""
        with contextlib.suppress(NatsError):
            await self._js.delete_msg(stream, sequence)

    async def subscribe(self, subject: str) -> LiveSubscription:
        """Live messages of `subject` from now on; returns once the server knows of it.

        Raises Unavailable when the broker does not answer until PUBLISH_DEADLINE_S.
        """
        listener = LiveSubscription()
        listener.subscription = await self._nc.subscribe(subject, cb=listener.receive)
        self._listeners.add(listener)
        try:
            await self._flush()
        except BaseException:
            await self.unsubscribe(listener)
            raise
        return listener

    async def unsubscribe(self, listener: LiveSubscription) -> None:
        self._listeners.discard(listener)
        if listener.subscription is not None:
            with contextlib.suppress(NatsError):
                await listener.subscription.unsubscribe()

    async def watch_subjects(self, subject: str, notice: Callable[[str], None]) -> None:
        """Call `notice` with the subject of every message that `subject` matches, from now on."""

        async def receive(msg: Msg) -> None:
            notice(msg.subject)

        await self._nc.subscribe(subject, cb=receive)
        await self._flush()

    async def request(
        self, subject: str, question: bytes, timeout_s: float, tenant: str = ""
    ) -> bytes:
        """The answer of whoever serves `subject`. Raises TimeoutError, or Unavailable at once when
        nobody does."""
        headers = tenant_header(tenant) or None
        try:
            msg = await self._nc.request(subject, question, timeout=timeout_s, headers=headers)
            return bytes(msg.data)
        except NatsTimeoutError as error:
            raise TimeoutError from error
        except NatsError as error:
            raise Unavailable(f"nobody answers on {subject}") from error

    async def request_many(
        self, subject: str, take: Callable[[bytes], bool], timeout_s: float
    ) -> None:
        """Give `take` the answers of all who serve `subject`, until it returns True for one, or
        there is no more time.

        Raises Unavailable without a connection.
        """
        inbox = self._nc.new_inbox()
        subscription = await self._nc.subscribe(inbox)
        try:
            async with asyncio.timeout(timeout_s):
                await self._nc.publish(subject, b"", reply=inbox)
                enough = False
                while not enough:
                    msg = await next_of(subscription, timeout_s)
                    nobody = (msg.headers or {}).get("Status") == "503"
                    enough = nobody or take(bytes(msg.data))
        except TimeoutError:
            pass
        except NatsError as error:
            raise Unavailable(f"nobody can be asked on {subject}: {error}") from error
        finally:
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()

    async def add_responder(self, subject: str, answer: Callable[[bytes], bytes]) -> None:
        """Answer every question on `subject` from now on."""

        async def receive(msg: Msg) -> None:
            await msg.respond(answer(msg.data))

        await self._nc.subscribe(subject, cb=receive)
        await self._flush()

    async def add_group_responder(
        self, subject: str, group: str, answer: Responder
    ) -> GroupResponder:
        """Answer, many at a time, the questions on `subject` that do not go to others of `group`.

        `answer` must not raise.
        """
        share = GroupResponder(answer)
        share.subscription = await self._nc.subscribe(subject, group, cb=share.receive)
        await self._flush()
        return share

    async def _flush(self) -> None:
        """Returns once the server knows all that was sent. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUBLISH_DEADLINE_S
        while True:
            try:
                # An answer that is lost with the connection would be waited for in vain, while the
                # next connection makes the subscriptions again by itself.
                await self._nc.flush(timeout=FLUSH_TIMEOUT_S)
                return
            except (NatsError, OSError, RuntimeError) as error:
                # The library writes to a connection of whose loss it has not been told, too.
                if loop.time() > deadline or self._nc.is_closed:
                    raise Unavailable(f"the broker does not answer: {error}") from error
            await asyncio.sleep(FIRST_RETRY_S)

    # -- workers ----------------------------------------------------------------------------

    async def publish_heartbeat(self, worker: str, data: bytes) -> None:
        await self.publish_without_id(subjects.heartbeat(worker), data)

    async def read_heartbeats(self) -> list[bytes]:
        """The last heartbeat of every worker that is alive."""
        stored = await self.read(subjects.WORKERS_STREAM, subjects.HEARTBEATS_FILTER)
        newest_ms = max((beat.stored_ms for beat in stored), default=0.0)
        return [b.data for b in stored if newest_ms - b.stored_ms <= 1000 * DEAD_AFTER_S]

    async def heartbeat_lag_s(self, worker: str, witness: str) -> float:
        """For how long `worker` has been silent while `witness`, who lives, has not.

        Infinite for one that is forgotten. While the broker is away nobody is heard, and that is no
        sign of death.
        """
        its = await self.read_last(subjects.WORKERS_STREAM, subjects.heartbeat(worker))
        ours = await self.read_last(subjects.WORKERS_STREAM, subjects.heartbeat(witness))
        if its is None:
            return math.inf
        return 0.0 if ours is None else (ours.stored_ms - its.stored_ms) / 1000
