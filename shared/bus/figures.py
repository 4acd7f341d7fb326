"""Figures of streams and queues: sizes, sequences, and how many messages wait."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import NotFoundError

from shared.bus.connection import REPLY_TIMEOUT_S, Connection
from shared.bus.reading import StoredMessage, answered
from shared.errors import NotFound, Unavailable

ReadNext = Callable[[str, int, str], Awaitable[StoredMessage | None]]
"""`Bus.read_next`."""


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


class StreamFigures:
    """The figures of one broker's streams and queues."""

    def __init__(self, connection: Connection, read_next: ReadNext) -> None:
        self._nc, self._js = connection.nc, connection.js
        self._read_next = read_next

    async def sequence_range(self, stream: str) -> tuple[int, int]:
        """Return the first and the last sequence of a stream."""
        state = (await answered(self._js.stream_info(stream), f"stream {stream}")).state
        return state.first_seq, state.last_seq

    async def lagging_replicas(self, stream: str) -> list[str]:
        """Return the servers whose replicas of a stream do not follow its leader.

        Raises Unavailable.
        """
        cluster = (await answered(self._js.stream_info(stream), f"stream {stream}")).cluster
        replicas = cluster.replicas or [] if cluster else []
        return [peer.name or "" for peer in replicas if peer.offline or not peer.current]

    async def streams_with(self, subject: str) -> list[str]:
        """Return the names of the streams that store subjects which `subject` matches."""
        names: list[str] = []
        total = 1
        while len(names) < total:
            query = json.dumps({"subject": subject, "offset": len(names)}).encode()
            reply = await answered(
                self._nc.request("$JS.API.STREAM.NAMES", query, timeout=REPLY_TIMEOUT_S),
                "the names of its streams",
            )
            page = json.loads(reply.data)
            if not page.get("streams"):
                break
            names += page["streams"]
            total = page["total"]
        return sorted(names)

    async def subjects_of(self, stream: str, subject: str) -> list[str]:
        """Return the subjects of a stream that match `subject`, which has wildcards.

        The server returns at most 100,000 of them, and a stream that does not exist has none.
        """
        try:
            info = await self._js.stream_info(stream, subjects_filter=subject)
        except NotFoundError:
            return []
        except NatsError as error:
            raise Unavailable(f"the broker did not report on stream {stream}: {error}") from error
        return sorted(info.state.subjects or {})

    async def num_bytes(self, stream: str) -> int:
        """Return the number of bytes in a stream."""
        return (await answered(self._js.stream_info(stream), f"stream {stream}")).state.bytes

    async def fill(self, stream: str) -> tuple[int, int]:
        """Return the maximum and the current number of bytes in a stream."""
        info = await answered(self._js.stream_info(stream), f"stream {stream}")
        return info.config.max_bytes or 0, info.state.bytes

    async def depth(self, stream: str, durable: str) -> QueueDepth:
        """Return the depth of a consumer's queue. Raises NotFound without such a consumer."""
        try:
            info = await self._js.consumer_info(stream, durable)
        except NotFoundError as error:
            raise NotFound(f"no worker has ever consumed {durable}") from error
        except NatsError as error:
            raise Unavailable(f"the broker did not report on consumer {durable}") from error
        return QueueDepth.of(info)

    async def depths(self, stream: str) -> list[QueueDepth]:
        """Return the depths of all consumers' queues of a stream."""
        queues: list[QueueDepth] = []
        while page := await answered(
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
        oldest = await self._read_next(stream, depth.last_delivered + 1, depth.subject)
        return None if oldest is None else oldest.stored_ms

    async def size(self, stream: str) -> tuple[int, float | None]:
        """Return the number of messages, and the oldest storage time in Unix milliseconds."""
        # nats-py's stream_info omits the time.
        reply = await answered(
            self._nc.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=REPLY_TIMEOUT_S),
            f"stream {stream}",
        )
        state = json.loads(reply.data).get("state")
        if state is None:
            raise Unavailable(f"the broker has no stream {stream}: no Pagemill runs there")
        first_ms = 1000 * datetime.fromisoformat(state["first_ts"]).timestamp()
        return state["messages"], first_ms if state["messages"] else None
