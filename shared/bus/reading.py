"""Reading of streams: direct gets, and the messages that they return."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

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
        async with connection.inbox.request(subject, data) as replies:
            return await _collect_replies(replies, batched="batch" in query)

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
