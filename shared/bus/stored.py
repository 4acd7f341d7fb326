"""Messages as a stream keeps them, and as a direct get brings them."""

from dataclasses import dataclass
from datetime import datetime

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.bus.connection import ANSWER_TIMEOUT_S, next_of


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as a stream keeps it."""

    sequence: int
    subject: str
    data: bytes
    stored_ms: float
    msg_id: str | None = None


class ReadFailed(Exception):
    """A read got a status instead of messages."""


async def collect_replies(
    subscription: Subscription, *, batched: bool
) -> tuple[list[StoredMessage], bool]:
    """The answers to one direct get, and whether more are left after a batch of them."""
    found: list[StoredMessage] = []
    while True:
        msg = await next_of(subscription, ANSWER_TIMEOUT_S)
        headers = msg.headers or {}
        status = headers.get("Status")
        if status == "404":
            return found, False
        if status == "204":
            return found, headers.get("Nats-Num-Pending", "0") != "0"
        if status is not None:
            # 503: no stream answers. To take that for an empty log would be to forget it.
            raise ReadFailed(f"status {status}")
        found.append(to_stored_message(msg))
        if not batched:
            return found, False


def to_stored_message(msg: Msg) -> StoredMessage:
    """From the headers that the server gives to what it reads or republishes from a stream."""
    headers = msg.headers or {}
    stored_ms = 1000 * datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp()
    return StoredMessage(
        int(headers["Nats-Sequence"]),
        headers.get("Nats-Subject", ""),
        bytes(msg.data),
        stored_ms,
        headers.get("Nats-Msg-Id"),
    )
