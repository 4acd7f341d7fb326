"""Messages of streams, and the replies of direct gets that contain them."""

from dataclasses import dataclass
from datetime import datetime

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.bus.connection import REPLY_TIMEOUT_S, next_message


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a stream."""

    sequence: int
    subject: str
    data: bytes
    stored_ms: float
    """Time of storage, in Unix milliseconds of the broker's clock."""
    msg_id: str | None = None


class ReadFailed(Exception):
    """Raised when a read returns an error status instead of messages."""


async def collect_replies(
    subscription: Subscription, *, batched: bool
) -> tuple[list[StoredMessage], bool]:
    """Collect the replies to one direct get.

    Return the messages, and whether the stream has more after this batch.
    """
    messages: list[StoredMessage] = []
    while True:
        msg = await next_message(subscription, REPLY_TIMEOUT_S)
        headers = msg.headers or {}
        status = headers.get("Status")
        if status == "404":
            return messages, False
        if status == "204":
            return messages, headers.get("Nats-Num-Pending", "0") != "0"
        if status is not None:
            # A 503 means that no stream replies. It must not be mistaken for an empty log.
            raise ReadFailed(f"status {status}")
        messages.append(to_stored_message(msg))
        if not batched:
            return messages, False


def to_stored_message(msg: Msg) -> StoredMessage:
    """Convert a message that the server has read or republished from a stream."""
    headers = msg.headers or {}
    stored_ms = 1000 * datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp()
    return StoredMessage(
        int(headers["Nats-Sequence"]),
        headers.get("Nats-Subject", ""),
        bytes(msg.data),
        stored_ms,
        headers.get("Nats-Msg-Id"),
    )
