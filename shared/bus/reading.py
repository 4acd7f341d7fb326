"""Reading streams and their state, and removing messages from them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import NotFoundError

from shared.bus.connection import BROKER_DEADLINE_S, MAX_RETRY_S, REPLY_TIMEOUT_S, BusPart
from shared.bus.replies import Replies
from shared.errors import NotFound, PayloadTooLarge, Unavailable
from shared.protocol import subjects
from shared.protocol.requests import TENANT_HEADER
from shared.protocol.stored_size import kept_headers
from shared.protocol.versions import version_of

# Server error codes (nats-server's errors.json) for a sequence without a message.
_NO_SUCH_MESSAGE = (10043, 10057)

READ_BATCH = 256
READ_BATCH_BYTES = 4 * 2**20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """Message of a stream."""

    sequence: int
    subject: str
    data: bytes
    stored_ms: float
    """Time of storage, in Unix milliseconds of the broker's clock."""
    msg_id: str | None = None
    log_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of `shared.protocol.stored_size`."""


class ReadFailed(Exception):
    """Raised when a read returns an error status instead of messages."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """Request as published by its client."""

    data: bytes
    tenant: str
    """Tenant in the subject, or else in the header; "" without either."""
    subject: str
    msg_id: str | None
    version: int
    """Version that a reader needs."""


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Numbers of messages in the queue of one consumer."""

    subject: str
    """Filter of the consumer."""
    last_delivered: int
    """Sequence of the last delivered message."""
    num_pending: int
    num_in_flight: int

    @classmethod
    def of(cls, info: api.ConsumerInfo) -> "QueueDepth":
        return cls(
            info.config.filter_subject or "",
            info.delivered.stream_seq if info.delivered else 0,
            info.num_pending or 0,
            info.num_ack_pending or 0,
        )


class StreamReader(BusPart):
    """Part of `Bus` that reads streams and removes messages."""

    async def read(
        self, stream: str, subject: str, first: int = 1, max_bytes: int | None = None
    ) -> list[StoredMessage]:
        """Return the messages of `subject` from sequence `first` on, oldest first.

        Raises PayloadTooLarge as soon as they exceed `max_bytes`, and Unavailable if the broker
        does not answer within BROKER_DEADLINE_S.
        """
        messages: list[StoredMessage] = []
        num_bytes, more = 0, True
        while more:
            query = {
                "seq": messages[-1].sequence + 1 if messages else first,
                "next_by_subj": subject,
                "batch": READ_BATCH,
                "max_bytes": READ_BATCH_BYTES,
            }
            batch, more = await self._direct_get(stream, query)
            messages += batch
            num_bytes += sum(len(message.data) for message in batch)
            if max_bytes is not None and num_bytes > max_bytes:
                raise PayloadTooLarge(f"{subject} has more than {max_bytes} bytes")
        return messages

    async def read_last(self, stream: str, subject: str) -> StoredMessage | None:
        """Return the latest message of `subject`, which may have wildcards."""
        messages, _ = await self._direct_get(stream, {"last_by_subj": subject})
        return messages[0] if messages else None

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
        messages, _ = await self._direct_get(stream, query)
        return messages[0] if messages else None

    async def _direct_get(
        self, stream: str, query: dict[str, object]
    ) -> tuple[list[StoredMessage], bool]:
        """Return the messages of a direct get, and whether the stream has more after them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BROKER_DEADLINE_S
        while True:
            try:
                subject, data = f"$JS.API.DIRECT.GET.{stream}", json.dumps(query).encode()
                async with self._replies.request(subject, data) as replies:
                    return await _collect_replies(replies, batched="batch" in query)
            except (NatsError, ReadFailed) as error:
                if loop.time() + MAX_RETRY_S > deadline:
                    raise Unavailable(f"the broker did not answer a read of {stream}") from error
            await asyncio.sleep(MAX_RETRY_S)

    async def get_queued_request(self, sequence: int) -> QueuedRequest | None:
        """Return a client's request that has not ended; None if it is no longer queued."""
        message = await self._get_request(sequence, is_next=False)
        return None if message is None else _to_queued_request(message)

    async def queued_requests(self) -> AsyncIterator[QueuedRequest]:
        """Yield all clients' requests that have not ended. Raises Unavailable."""
        sequence = 1
        while (message := await self._get_request(sequence, is_next=True)) is not None:
            yield _to_queued_request(message)
            sequence = (message.seq or 0) + 1

    async def _get_request(self, sequence: int, *, is_next: bool) -> api.RawStreamMsg | None:
        # Unlike a direct get, this reads from the leader of the stream.
        subject = subjects.REQUESTS_FILTER if is_next else None
        try:
            return await self._js.get_msg(
                subjects.REQUESTS_STREAM, sequence, subject=subject, next=is_next
            )
        except NotFoundError:
            return None
        except NatsError as error:
            raise Unavailable(f"the broker did not return request {sequence}") from error

    async def sequence_range(self, stream: str) -> tuple[int, int]:
        """Return the first and the last sequence of a stream."""
        state = (await _answered(self._js.stream_info(stream), f"stream {stream}")).state
        return state.first_seq, state.last_seq

    async def subjects_of(self, stream: str, subject: str) -> list[str]:
        """Return the subjects of a stream that match `subject`, which has wildcards.

        The server returns at most 100,000 of them.
        """
        info = self._js.stream_info(stream, subjects_filter=subject)
        return sorted((await _answered(info, f"stream {stream}")).state.subjects or {})

    async def stream_bytes(self, stream: str) -> int:
        """Return the number of bytes in a stream."""
        return (await _answered(self._js.stream_info(stream), f"stream {stream}")).state.bytes

    async def stream_fill(self, stream: str) -> tuple[int, int]:
        """Return the maximum and the current number of bytes in a stream."""
        info = await _answered(self._js.stream_info(stream), f"stream {stream}")
        return info.config.max_bytes or 0, info.state.bytes

    async def queue_depth(self, stream: str, durable: str) -> QueueDepth:
        """Return the depth of a consumer's queue. Raises NotFound without such a consumer."""
        try:
            info = await self._js.consumer_info(stream, durable)
        except NotFoundError as error:
            raise NotFound(f"no worker has ever consumed {durable}") from error
        except NatsError as error:
            raise Unavailable(f"the broker did not report on consumer {durable}") from error
        return QueueDepth.of(info)

    async def queue_depths(self, stream: str) -> list[QueueDepth]:
        """Return the depths of all consumers' queues of a stream."""
        queues: list[QueueDepth] = []
        while page := await _answered(
            self._js.consumers_info(stream, offset=len(queues)), f"the consumers of {stream}"
        ):
            queues += [QueueDepth.of(info) for info in page]
        return queues

    async def oldest_pending_ms(self, stream: str, depth: QueueDepth) -> float | None:
        """Return the storage time of the oldest undelivered message, in Unix milliseconds.

        None if there is none, or if it has been delivered or removed meanwhile.
        """
        if not depth.num_pending:
            return None
        oldest = await self.read_next(stream, depth.last_delivered + 1, depth.subject)
        return None if oldest is None else oldest.stored_ms

    async def stream_size(self, stream: str) -> tuple[int, float | None]:
        """Return the number of messages, and the oldest storage time in Unix milliseconds."""
        # nats-py's stream_info omits the time.
        reply = await _answered(
            self._nc.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=REPLY_TIMEOUT_S),
            f"stream {stream}",
        )
        state = json.loads(reply.data).get("state")
        if state is None:
            raise Unavailable(f"the broker has no stream {stream}: no Pagemill runs there")
        first_ms = 1000 * datetime.fromisoformat(state["first_ts"]).timestamp()
        return state["messages"], first_ms if state["messages"] else None

    async def purge(self, stream: str, subject: str) -> None:
        """Remove all messages of `subject`.

        Messages of work queues must be removed with `delete` instead: after a purge, nats-server
        2.15.1 counts messages of other subjects as acknowledged if they were delivered before a
        purged message.
        """
        try:
            await self._js.purge_stream(stream, subject=subject)
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
        reply = json.loads((await _answered(removing, failed)).data)
        if reply.get("error", {}).get("err_code") not in (None, *_NO_SUCH_MESSAGE):
            raise Unavailable(f"the broker did not remove {failed}: {reply['error']}")


def _to_queued_request(message: api.RawStreamMsg) -> QueuedRequest:
    subject, headers = message.subject or "", message.headers or {}
    tenant = subjects.tenant_of(subject) or headers.get(TENANT_HEADER, "")
    return QueuedRequest(
        message.data or b"", tenant, subject, headers.get("Nats-Msg-Id"), version_of(headers)
    )


async def _answered(reply: Awaitable[T], resource: str) -> T:
    """Return the broker's reply. Raises Unavailable without one."""
    try:
        return await reply
    except NatsError as error:
        raise Unavailable(f"the broker did not report on {resource}: {error}") from error


async def _collect_replies(replies: Replies, *, batched: bool) -> tuple[list[StoredMessage], bool]:
    """Collect the replies to one direct get.

    Return the messages, and whether the stream has more after this batch.
    """
    messages: list[StoredMessage] = []
    while True:
        msg = await replies.next(REPLY_TIMEOUT_S)
        headers = msg.headers or {}
        # A stored message may have any header. The broker adds `Nats-Stream` to stored messages.
        status = None if "Nats-Stream" in headers else headers.get("Status")
        if status == "404":
            return messages, False
        if status == "204":
            return messages, headers.get("Nats-Num-Pending", "0") != "0"
        if status is not None:
            # A 503 means that no stream has replied. It must not be mistaken for an empty log.
            raise ReadFailed(f"status {status}")
        messages.append(to_stored_message(msg))
        if not batched:
            return messages, False


def to_stored_message(msg: Msg) -> StoredMessage:
    """Convert a message that the server has returned or republished from a stream."""
    headers = msg.headers or {}
    stored_ms = 1000 * datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp()
    return StoredMessage(
        int(headers["Nats-Sequence"]),
        headers.get("Nats-Subject", ""),
        bytes(msg.data),
        stored_ms,
        headers.get("Nats-Msg-Id"),
        kept_headers(headers),
    )
