"""Blobs: large payloads outside the messages, read by reference through any transport.

A worker stores its blobs in its arena (`shared.blobs.server`). A reader uses the first transport
that works: the owner's memory on the same machine, a TCP connection, or chunks over the broker,
which needs no other connection and is the slowest. Callers are independent of the transport.

A blob is lost with its owner, or when it expires. Reading it then raises `BlobLost`, and the stage
that created it runs again.
"""

import asyncio
import contextlib
import functools
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

import structlog

from shared.blobs import protocol
from shared.blobs.arena import Buffer
from shared.blobs.buffer_pool import BufferPool
from shared.blobs.server import BlobServer
from shared.blobs.transports import (
    CHUNK_BYTES,
    Blob,
    BusTransport,
    SharedMemoryTransport,
    TcpTransport,
    Transport,
)
from shared.bus.bus import Bus
from shared.config.schema import BlobsConfig
from shared.errors import BlobLost, Unavailable
from shared.helpers.task_set import TaskSet
from shared.protocol import names, subjects
from shared.protocol.messages import BlobAddress, decode_heartbeat
from shared.protocol.multimodal import BlobRef

# Limit on owners with cached transports, because workers come and go.
MAX_OWNERS = 64
# Validity of the cached list of neighbours.
NEIGHBOURS_TTL_S = 2.0
# Interval of the search for dead owners. Their memory exists as long as it is mapped here.
SWEEP_INTERVAL_S = 1.0
# Pauses before attempts to release a blob, because an owner may be frozen or without a broker for a
# moment. An attempt that takes longer than `RELEASE_SENT_S` has been sent to a frozen owner.
RELEASE_PAUSES_S = (0.0, 0.5, 2.0)
RELEASE_SENT_S = 0.25

_log = structlog.get_logger()


class Blobs:
    """One worker's blobs, and its transports for the blobs of other workers."""

    def __init__(self, bus: Bus, role: str, worker: str, config: BlobsConfig) -> None:
        self._bus = bus
        self._role = role
        self._worker = worker
        self._config = config
        self._server = BlobServer(worker, config.arena_mib * 2**20)
        self._pool = BufferPool(config.arena_mib * 2**20)
        self._transports: OrderedDict[str, list[Transport]] = OrderedDict()
        """Cached transports by owner, the fastest first."""
        self._neighbours: dict[str, BlobAddress] = {}
        self._neighbours_until_s = 0.0
        self._sweeping: asyncio.Task[None] | None = None
        self._releasing = TaskSet()

    async def start(self, listener: socket.socket | None = None) -> None:
        """Start serving the blobs of this worker, also over TCP if there is a bound `listener`."""
        self._server.start()
        config = self._config
        if listener is not None and config.listen is not None:
            name = config.advertise or self._bus.address_of(config.listen)
            self._server.listen(listener, name)
        await self._bus.add_responder(subjects.blob(self._worker), self._reply)
        self._sweeping = asyncio.create_task(self._sweep())

    @property
    def address(self) -> BlobAddress:
        return self._server.address

    @property
    def capacity(self) -> int:
        """Size of the arena in bytes. A larger blob never fits."""
        return self._server.arena.slots.capacity

    @property
    def num_pinned(self) -> int:
        """Number of blobs that have not been fetched, or are being read."""
        return self._server.arena.slots.num_pinned

    def load(self) -> dict[str, float]:
        """Return the arena's load for heartbeats."""
        slots = self._server.arena.slots
        return {"arena_pinned": self.num_pinned, "arena_bytes": slots.capacity - slots.num_free}

    async def close(self) -> None:
        for task in (self._sweeping, *self._releasing):
            if task is not None:
                task.cancel()
        self._close_transports()
        await self._server.close()

    # -- own blobs ----------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer], ttl_s: float) -> BlobRef | None:
        """Store the concatenated `parts` for `ttl_s`. Return None if there is no room.

        `name` is a hash of the content, 64 hexadecimal digits. A blob that is already stored under
        it is not copied again.
        """
        return self._server.put(name, parts, ttl_s)

    async def find(self, name: str, ttl_s: float) -> BlobRef | None:
        """Return a new reference to the blob with this name, or None if it is not stored.

        The blob may belong to this worker, or to another worker of its role on this machine.
        """
        if (ours := self._server.find(name, ttl_s)) is not None:
            return ours
        for worker, address in (await self._find_neighbours()).items():
            transport = self._cached_transports(worker, address)[0]
            assert isinstance(transport, SharedMemoryTransport)
            try:
                if (key_and_size := await transport.find(name, ttl_s)) is not None:
                    return BlobRef(worker, *key_and_size)
            except (OSError, TimeoutError, ValueError):
                continue
        # Another task may have stored it here during the requests to the neighbours.
        return self._server.find(name, ttl_s)

    async def _find_neighbours(self) -> dict[str, BlobAddress]:
        """Return the other workers of this role with memory that can be mapped; briefly cached."""
        now_s = time.monotonic()
        if now_s > self._neighbours_until_s:
            self._neighbours_until_s = now_s + NEIGHBOURS_TTL_S
            beats = await self._bus.heartbeats.read()
            self._neighbours = {
                beat.worker: beat.blobs
                for beat in beats
                if beat.role == self._role
                and beat.worker != self._worker
                and beat.blobs is not None
                and beat.blobs.host == self.address.host
            }
        return self._neighbours

    def _reply(self, data: bytes) -> bytes:
        """Return the reply to a request over the broker; empty without data."""
        chunk = protocol.unpack_chunk(data)
        if chunk is None or chunk.num_bytes > CHUNK_BYTES:
            return b""
        if chunk.operation == protocol.RELEASE:
            self._server.release(chunk.key)
            return b""
        if chunk.operation == protocol.ACKNOWLEDGE:
            self._server.acknowledge(chunk.key)
            return b""
        reader = "broker"
        slot = self._server.open(chunk.key, reader)
        if slot is None:
            return b""
        view = self._server.arena.view(slot)[chunk.offset : chunk.offset + chunk.num_bytes]
        self._server.arena.slots.unpin_all(reader)
        return bytes(view)

    def discard(self, ref: BlobRef) -> None:
        """Release a reference of this worker that was not sent to another worker."""
        self._server.release(ref.key)

    def release_all(self) -> None:
        """End the validity of all references to blobs of this worker, because their tasks are lost.

        If a reference was not lost, its reader finds that the blob is gone, and it is made again.
        """
        self._server.release_all()

    def clear(self) -> None:
        """Remove all blobs without readers, and close all transports."""
        self._close_transports()
        self._server.clear()

    def _close_transports(self) -> None:
        _close_all(chain.from_iterable(self._transports.values()))
        self._transports.clear()

    # -- blobs of any owner -------------------------------------------------------------------

    async def get(self, ref: BlobRef) -> Blob:
        """Open a blob. Raises BlobLost if it is gone, or no transport reaches its owner."""
        if ref.worker == self._worker:
            return self._get_own(ref)
        for transport in await self._transports_to(ref.worker):
            try:
                return await transport.get(ref)
            except (OSError, TimeoutError, ValueError, Unavailable) as error:
                _log.warning(
                    "transport_failed",
                    transport=type(transport).__name__,
                    owner=ref.worker,
                    error=str(error) or type(error).__name__,
                )
        raise BlobLost("no transport could read a payload from its owner")

    async def acknowledge(self, ref: BlobRef) -> None:
        """Allow the owner to evict the blob, because one reader has received it.

        Until then, other readers can use the same reference.
        """
        if ref.worker == self._worker:
            self._server.acknowledge(ref.key)
        else:
            with contextlib.suppress(Unavailable):
                transports = await self._transports_to(ref.worker)
                await _send(transports, ref, protocol.ACKNOWLEDGE)

    async def release(self, ref: BlobRef) -> None:
        """End the validity of a reference.

        Return when the owner has confirmed it, has exited, or is frozen and will find it. While no
        transport reaches the owner, which may be about to return with the broker, this waits for
        the next attempt. After the last one, the reference remains valid until it expires.
        """
        if ref.worker == self._worker:
            self.discard(ref)
            return
        is_sent = asyncio.Event()
        self._releasing.start(self._release(ref, is_sent))
        await is_sent.wait()

    async def _release(self, ref: BlobRef, is_sent: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        try:
            for pause_s in RELEASE_PAUSES_S:
                await asyncio.sleep(pause_s)
                try:
                    transports = await self._transports_to(ref.worker)
                except Unavailable:
                    continue
                timer = loop.call_later(RELEASE_SENT_S, is_sent.set)
                if await _send(transports, ref, protocol.RELEASE):
                    return
                timer.cancel()
        finally:
            is_sent.set()

    def _get_own(self, ref: BlobRef) -> Blob:
        reader = f"self-{secrets.token_hex(8)}"
        slot = self._server.open(ref.key, reader)
        if slot is None:
            raise BlobLost("a payload has expired at its owner")
        arena = self._server.arena
        return Blob(arena.view(slot), functools.partial(arena.slots.unpin_all, reader))

    async def _transports_to(self, owner: str) -> list[Transport]:
        if not names.is_name(owner):  # The name becomes part of a subject.
            return []
        if owner in self._transports:
            self._transports.move_to_end(owner)
            return self._transports[owner]
        stored = await self._bus.read_last(subjects.WORKERS_STREAM, subjects.heartbeat(owner))
        beat = None if stored is None else decode_heartbeat(stored.data)
        if beat is None or beat.blobs is None:
            # The owner may still be alive, if the broker has just lost all heartbeats.
            return [BusTransport(self._bus, owner, self._pool)]
        return self._cached_transports(owner, beat.blobs)

    def _cached_transports(self, owner: str, address: BlobAddress) -> list[Transport]:
        # Another task may have created them meanwhile.
        if owner not in self._transports:
            self._transports[owner] = self._create_transports(owner, address)
            if len(self._transports) > MAX_OWNERS:
                _close_all(self._transports.popitem(last=False)[1])
        self._transports.move_to_end(owner)
        return self._transports[owner]

    def _create_transports(self, owner: str, address: BlobAddress) -> list[Transport]:
        transports: list[Transport] = []
        if address.host == self.address.host:
            transports.append(SharedMemoryTransport(address.local))
        if address.tcp is not None:
            transports.append(TcpTransport(address.tcp, self._pool))
        return [*transports, BusTransport(self._bus, owner, self._pool)]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            for owner, transports in list(self._transports.items()):
                if any(transport.is_closed_by_owner for transport in transports):
                    del self._transports[owner]
                    _close_all(transports)


async def release_by_broker(bus: Bus, ref: BlobRef) -> None:
    """End the validity of a reference, from a worker that has no blobs.

    Without an answer from the owner, it remains valid until it expires.
    """
    if names.is_name(ref.worker):
        await _send([BusTransport(bus, ref.worker, BufferPool(0))], ref, protocol.RELEASE)


async def _send(
    transports: Iterable[Transport], ref: BlobRef, operation: protocol.BlobOperation
) -> bool:
    """Send an operation to the owner. Return whether it has confirmed it, or has exited."""
    has_exited = False
    for transport in transports:
        try:
            await transport.send(ref, operation)
            return True
        except ConnectionRefusedError:
            has_exited = True
        except (OSError, TimeoutError, ValueError, Unavailable):
            continue
    return has_exited


def _close_all(transports: Iterable[Transport]) -> None:
    for transport in transports:
        transport.close()
