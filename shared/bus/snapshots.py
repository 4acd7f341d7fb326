"""Snapshots of streams: JetStream's own format, written and read in chunks."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js.errors import NotFoundError

from shared.bus.bus import Bus
from shared.bus.connection import FIRST_RETRY_S, next_message, retry_until
from shared.errors import Unavailable

# Within the 1 MiB that every accepted server takes.
SNAPSHOT_CHUNK_BYTES = 512 * 1024
# A server that syncs each message acknowledges a chunk when its messages are stored. It gives up a
# restore after five seconds without a chunk.
RESTORE_CHUNK_BYTES = 32 * 1024
# The server creates the files of a stream before it answers, in a cluster on several machines.
SNAPSHOT_REPLY_S = 60.0
# One server of a cluster returns the subject of a restore and subscribes to it. The server of this
# connection may learn of the subscription a moment later.
LISTENER_S = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a stream at one moment: configuration, numbers, and content in chunks."""

    config: dict[str, Any]
    state: dict[str, Any]
    chunks: AsyncIterator[bytes]


class StreamSnapshots:
    """Copies whole streams."""

    def __init__(self, bus: Bus) -> None:
        self._nc, self._js = bus.connection.nc, bus.connection.js

    async def streams_among(self, names: Iterable[str]) -> list[str]:
        """Return the names of existing streams among `names`. Raises Unavailable."""
        existing = []
        for name in names:
            try:
                await self._js.stream_info(name)
            except NotFoundError:
                continue
            except NatsError as error:
                raise Unavailable(f"the broker did not report on stream {name}") from error
            existing.append(name)
        return existing

    @contextlib.asynccontextmanager
    async def open_snapshot(self, stream: str, *, with_consumers: bool) -> AsyncIterator[Snapshot]:
        """Yield a snapshot of a stream. The server sends its chunks while they are read.

        Raises Unavailable, also while the chunks are read.
        """
        inbox = self._nc.new_inbox()
        subscription = await self._nc.subscribe(inbox)
        query = {
            "deliver_subject": inbox,
            "no_consumers": not with_consumers,
            "chunk_size": SNAPSHOT_CHUNK_BYTES,
        }
        try:
            reply = await self._ask(f"$JS.API.STREAM.SNAPSHOT.{stream}", query, stream)
            yield Snapshot(reply["config"], reply["state"], self._chunks(stream, subscription))
        finally:
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()

    async def _chunks(self, stream: str, subscription: Subscription) -> AsyncIterator[bytes]:
        while True:
            try:
                message = await next_message(subscription, SNAPSHOT_REPLY_S)
            except NatsError as error:
                raise Unavailable(f"the snapshot of stream {stream} has stopped") from error
            if not message.data:
                status = (message.headers or {}).get("Status", "204")
                if status != "204":
                    raise Unavailable(f"the snapshot of stream {stream} failed: status {status}")
                return
            yield bytes(message.data)
            if message.reply:  # The server waits for this after each window of chunks.
                await self._nc.publish(message.reply, b"")

    async def restore_snapshot(
        self, stream: str, config: dict[str, Any], state: dict[str, Any], data: Iterable[bytes]
    ) -> int:
        """Create a stream from a snapshot, and return its number of messages.

        `data` has parts of any size. Raises Unavailable, also for a stream that exists.
        """
        query = {"config": config, "state": state}
        place = await self._ask(f"$JS.API.STREAM.RESTORE.{stream}", query, stream)
        for part in data:
            for start in range(0, len(part), RESTORE_CHUNK_BYTES):
                await self._send(
                    place["deliver_subject"], part[start : start + RESTORE_CHUNK_BYTES], stream
                )
        created = await self._send(place["deliver_subject"], b"", stream)
        return int(created["state"]["messages"])

    async def remove_stream(self, stream: str) -> None:
        """Remove a stream with all its messages and consumers. Raises Unavailable."""
        try:
            await self._js.delete_stream(stream)
        except NatsError as error:
            raise Unavailable(f"the broker did not remove stream {stream}: {error}") from error

    async def _ask(self, subject: str, query: dict[str, Any], stream: str) -> dict[str, Any]:
        return await self._send(subject, json.dumps(query).encode(), stream)

    async def _send(self, subject: str, data: bytes, stream: str) -> dict[str, Any]:
        """Return the reply of the server, which is empty for a chunk. Raises Unavailable."""

        async def attempt() -> Msg:
            return await self._nc.request(subject, data, timeout=SNAPSHOT_REPLY_S)

        description = f"the broker did not answer about stream {stream}"
        try:
            reply = await retry_until(
                LISTENER_S, attempt, (NoRespondersError,), description, FIRST_RETRY_S
            )
        except NatsError as error:
            raise Unavailable(description) from error
        answer: dict[str, Any] = json.loads(reply.data) if reply.data else {}
        if "error" in answer:
            raise Unavailable(f"stream {stream}: {answer['error'].get('description', 'refused')}")
        return answer
