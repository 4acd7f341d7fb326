"""The connection to the broker: publish with an ack, fenced append, read, listen; and consumers.

What it knows is delivery. What the bytes mean, and what a stage does with them, it does not know.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass

import nats
import structlog
from nats.aio.client import Client as NatsClient
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import OutboundBufferLimitError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError
from nats.js.kv import KeyValue

from shared import subjects
from shared.config import DeliveryConfig
from shared.consumer import Consumer
from shared.errors import ConfigError, Fenced, Overloaded, PayloadTooLarge, Unavailable

# Two missed pings of two seconds: a peer that has gone silent is noticed after six seconds
# instead of the library's six minutes.
PING_INTERVAL_S = 2
MAX_OUTSTANDING_PINGS = 2
RECONNECT_WAIT_S = 0.1

ANSWER_TIMEOUT_S = 2.0
# A leader election of a replicated stream takes 4 to 7 seconds, in which publishes are refused.
PUBLISH_DEADLINE_S = 15.0
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0

# A request published again within this window is recognised by its id.
DUPLICATE_WINDOW_S = 120.0

READ_BATCH = 256

# Server error codes (nats-server's errors.json).
_WRONG_LAST_SEQUENCE = 10071
_STORE_FAILED = 10077
_STREAM_EXISTS = 10058

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as a stream keeps it."""

    sequence: int
    data: bytes


class Bus:
    """A connection to the broker, which reconnects for ever."""

    def __init__(self, nc: NatsClient) -> None:
        self._nc = nc
        self._js: JetStreamContext = nc.jetstream(timeout=ANSWER_TIMEOUT_S)
        self._consumers: list[Consumer] = []
        self._workers: KeyValue | None = None
        self._closing = False

    @classmethod
    async def connect(cls, url: str, name: str, timeout_s: float = 10.0) -> "Bus":
        """Raises Unavailable when no server answers at `url` within `timeout_s`."""
        nc = NatsClient()
        bus: Bus | None = None

        async def disconnected() -> None:
            if bus is not None and not bus._closing:
                _log.warning("broker_lost", url=url)

        async def reconnected() -> None:
            if bus is not None:
                _log.info("broker_found", url=url)
                for consumer in bus._consumers:
                    consumer.reconnected()

        async def report(error: Exception) -> None:
            # Every attempt to reconnect reports that it was refused; `disconnected` has said so.
            if not isinstance(error, OSError):
                _log.warning("nats_error", error=str(error) or type(error).__name__)

        try:
            async with asyncio.timeout(timeout_s):
                await nc.connect(
                    url,
                    name=name,
                    disconnected_cb=disconnected,
                    reconnected_cb=reconnected,
                    error_cb=report,
                    ping_interval=PING_INTERVAL_S,
                    max_outstanding_pings=MAX_OUTSTANDING_PINGS,
                    # Declared as whole seconds, used as a delay.
                    reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    max_reconnect_attempts=-1,
                    pending_size=64 * 2**20,
                )
        except (TimeoutError, OSError, NatsError) as error:
            await nc.close()
            raise Unavailable(f"no nats-server answers at {url}") from error
        bus = cls(nc)
        return bus

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

    async def create_streams(self, delivery: DeliveryConfig) -> None:
        """Idempotent: any role may be the first to start.

        Raises ConfigError when a stream of that name cannot become what it must be.
        """
        for name, subject in (
            (subjects.REQUESTS_STREAM, subjects.REQUESTS_FILTER),
            (subjects.STAGES_STREAM, subjects.STAGES_FILTER),
        ):
            await self._create_stream(
                api.StreamConfig(
                    name=name,
                    subjects=[subject],
                    retention=api.RetentionPolicy.WORK_QUEUE,
                    discard=api.DiscardPolicy.NEW,
                    max_msgs=delivery.max_queued,
                    duplicate_window=DUPLICATE_WINDOW_S,
                )
            )
        await self._create_stream(
            api.StreamConfig(
                name=subjects.TOKENS_STREAM,
                subjects=[subjects.APPEND_FILTER],
                subject_transform=api.SubjectTransform(
                    src=subjects.APPEND_FILTER, dest=subjects.TOKENS_TARGET
                ),
                republish=api.RePublish(src=subjects.TOKENS_FILTER, dest=subjects.TOKENS_TARGET),
                allow_direct=True,
                max_age=delivery.token_log_age_s,
            )
        )
        await self._create_stream(
            api.StreamConfig(
                name=subjects.DEAD_STREAM, subjects=[subjects.DEAD_FILTER], allow_direct=True
            )
        )

    async def _create_stream(self, config: api.StreamConfig) -> None:
        try:
            await self._js.add_stream(config)
        except APIError as error:
            if error.err_code != _STREAM_EXISTS:
                raise Unavailable(f"stream {config.name}: {error.description}") from error
            await self._update_stream(config)

    async def _update_stream(self, config: api.StreamConfig) -> None:
        try:
            await self._js.update_stream(config)
        except APIError as error:
            raise ConfigError(
                f"stream {config.name} exists at this server with other settings, which cannot be"
                f" changed: {error.description}"
            ) from error

    # -- publishing -------------------------------------------------------------------------

    async def publish(self, subject: str, data: bytes, msg_id: str) -> bool:
        """Store `data` once; returns whether a message with this id had been stored before.

        An attempt whose ack does not come may have been stored all the same: it is repeated under
        the same id until PUBLISH_DEADLINE_S, then Unavailable is raised.
        """
        self.check_size(data, subject)
        ack = await self._publish(subject, data, {"Nats-Msg-Id": msg_id})
        return bool(ack.duplicate)

    async def append(self, subject: str, data: bytes, last_sequence: int) -> int:
        """Store `data` if `last_sequence` is still the last of its subject; returns its sequence.

        Raises Fenced when another writer came first.
        """
        self.check_size(data, subject)
        header = {"Nats-Expected-Last-Subject-Sequence": str(last_sequence)}
        try:
            return (await self._publish(subject, data, header)).seq
        except APIError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                raise Fenced(f"{subject} has moved on from sequence {last_sequence}") from error
            raise

    def check_size(self, data: bytes, what: str) -> None:
        """Raises PayloadTooLarge; the headers share the server's limit with the payload."""
        limit = self.max_payload - 1024
        if len(data) > limit:
            raise PayloadTooLarge(
                f"the message for {what} has {len(data)} bytes, the limit is {limit}:"
                " send fewer or smaller pictures",
                field="messages",
            )

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str]) -> api.PubAck:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUBLISH_DEADLINE_S
        pause = FIRST_RETRY_S
        while True:
            try:
                return await self._js.publish(subject, data, headers=headers)
            except (
                TimeoutError,
                NatsError,
                NoStreamResponseError,
                ServiceUnavailableError,
                OutboundBufferLimitError,
            ) as error:
                if isinstance(error, APIError):
                    if error.err_code == _STORE_FAILED and "maximum" in (error.description or ""):
                        raise Overloaded(f"the queue of {subject} is full; try again") from error
                    if not isinstance(error, ServiceUnavailableError):
                        raise
                if loop.time() + pause > deadline:
                    raise Unavailable(f"the broker did not store a message: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_S)

    # -- consuming and reading --------------------------------------------------------------

    async def consume(
        self, stream: str, durable: str, subject: str, capacity: int, ack_wait_s: float
    ) -> Consumer:
        """A share in the durable consumer `durable`, which is made if it does not exist."""
        await self._js.add_consumer(
            stream,
            api.ConsumerConfig(
                durable_name=durable,
                filter_subject=subject,
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=ack_wait_s,
                # Attempts are counted by the workers, which can write a dead letter; the server
                # would leave the message in the queue for ever without a word.
                max_deliver=-1,
                # Credit bounds what each worker holds; a common bound would let one worker that
                # holds many starve the others.
                max_ack_pending=-1,
            ),
        )
        consumer = Consumer(self._nc, stream, durable, capacity)
        self._consumers.append(consumer)
        await consumer.start()
        return consumer

    async def read(self, stream: str, subject: str) -> list[Stored]:
        """All messages of `subject`, oldest first.

        Raises Unavailable when the broker does not answer until PUBLISH_DEADLINE_S.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUBLISH_DEADLINE_S
        while True:
            try:
                return await self._read(stream, subject)
            except (NatsError, _NotAnswered) as error:
                if loop.time() + MAX_RETRY_S > deadline:
                    raise Unavailable(f"the broker did not answer a read of {subject}") from error
            await asyncio.sleep(MAX_RETRY_S)

    async def _read(self, stream: str, subject: str) -> list[Stored]:
        found: list[Stored] = []
        inbox = self._nc.new_inbox()
        subscription = await self._nc.subscribe(inbox)
        try:
            more = True
            while more:
                first = found[-1].sequence + 1 if found else 1
                request = {"seq": first, "next_by_subj": subject, "batch": READ_BATCH}
                await self._nc.publish(
                    f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=inbox
                )
                more = await _collect(subscription, found)
        finally:
            await subscription.unsubscribe()
        return found

    async def listen(self, subject: str) -> "Listener":
        """Live messages of `subject` from now on; returns once the server knows of it."""
        subscription = await self._nc.subscribe(subject)
        await self._nc.flush()
        return Listener(subscription)

    # -- workers ----------------------------------------------------------------------------

    async def put_heartbeat(self, worker: str, data: bytes, ttl_s: float) -> None:
        if self._workers is None:
            self._workers = await self._js.create_key_value(
                api.KeyValueConfig(bucket=subjects.WORKERS_BUCKET, ttl=ttl_s)
            )
        await self._workers.put(worker, data)

    async def heartbeats(self) -> list[bytes]:
        """The last heartbeat of every worker that is alive."""
        try:
            bucket = await self._js.key_value(subjects.WORKERS_BUCKET)
            keys = await bucket.keys()
        except NatsError:
            return []
        values = []
        for key in keys:
            try:
                values.append((await bucket.get(key)).value or b"")
            except NatsError:
                continue
        return values


class Listener:
    """A live subscription. It may lose messages when read slowly; the stream has them all."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def next(self, timeout_s: float) -> bytes | None:
        """The next message, or None after `timeout_s` of silence."""
        try:
            return bytes((await self._subscription.next_msg(timeout=timeout_s)).data)
        except nats.errors.TimeoutError:
            return None

    async def close(self) -> None:
        try:
            await self._subscription.unsubscribe()
        except NatsError:
            return


class _NotAnswered(Exception):
    """A read got a status instead of messages."""


async def _collect(subscription: Subscription, found: list[Stored]) -> bool:
    """Take the answers to one batched read; returns whether more are left after it."""
    while True:
        msg = await subscription.next_msg(timeout=ANSWER_TIMEOUT_S)
        headers = msg.headers or {}
        status = headers.get("Status")
        if status == "404":
            return False
        if status == "204":
            return headers.get("Nats-Num-Pending", "0") != "0"
        if status is not None:
            # 503: no stream answers. To take that for an empty log would be to forget it.
            raise _NotAnswered(f"status {status}")
        found.append(Stored(int(headers["Nats-Sequence"]), bytes(msg.data)))
