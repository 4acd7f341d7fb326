"""Reading of streams: direct gets, and the messages that they return."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from shared.bus.connection import (
    BROKER_DEADLINE_S,
    FIRST_RETRY_S,
    REPLY_TIMEOUT_S,
    Connection,
    retry_until,
)
from shared.bus.replies import Replies
from shared.errors import Unavailable
from shared.protocol.encoding import to_json
from shared.protocol.stored_size import kept_headers

# Time by which a replica that serves reads may lag.
STALE_READ_S = 0.02

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


async def direct_get(
    connection: Connection, stream: str, query: dict[str, object]
) -> tuple[list[StoredMessage], bool]:
    """Return the messages of a direct get, and whether the stream has more after them."""
    subject, data = f"$JS.API.DIRECT.GET.{stream}", to_json(query)

    async def attempt() -> tuple[list[StoredMessage], bool]:
        if "batch" not in query:
            message = _message_of(await connection.inbox.ask(subject, data, REPLY_TIMEOUT_S))
            return [] if isinstance(message, _End) else [message], False
        async with connection.inbox.request(subject, data) as replies:
            return await _collect_batch(replies)

    return await retry_until(
        BROKER_DEADLINE_S,
        attempt,
        (NatsError, ReadFailed),
        f"the broker did not answer a read of {stream}",
        FIRST_RETRY_S,
    )


async def answered(reply: Awaitable[T], resource: str) -> T:
    """Return the broker's reply. Raises Unavailable if there is none."""
    try:
        return await reply
    except NatsError as error:
        raise Unavailable(f"the broker did not report on {resource}: {error}") from error


class _End(NamedTuple):
    """End of a batch, which is empty if there are no messages."""

    has_more: bool


async def _collect_batch(replies: Replies) -> tuple[list[StoredMessage], bool]:
    """Return the messages of a batch, and whether the stream has more after them."""
    messages: list[StoredMessage] = []
    while True:
        message = _message_of(await replies.next(REPLY_TIMEOUT_S))
        if isinstance(message, _End):
            return messages, message.has_more
        messages.append(message)


def _message_of(msg: Msg) -> StoredMessage | _End:
    """Return the message in a reply, or the end of the batch. Raises ReadFailed."""
    headers = msg.headers or {}
    # A stored message may have any header. The broker adds `Nats-Stream` to stored messages.
    status = None if "Nats-Stream" in headers else headers.get("Status")
    if status is None:
        return to_stored_message(msg)
    if status not in ("204", "404"):
        # A 503 means that no stream has replied. It must not be mistaken for an empty log.
        raise ReadFailed(f"status {status}")
    return _End(status == "204" and headers.get("Nats-Num-Pending", "0") != "0")


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
