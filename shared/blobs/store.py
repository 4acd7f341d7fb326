"""Large payloads beside the messages: put once, had by whoever has a reference, by any road.

A worker keeps what it has put in its arena (`shared.blobs.server`). A reader takes the first road
that leads there: the owner's memory itself where both are on one machine, a TCP connection, or
pieces over the broker, which needs nothing else and is the slowest. The caller does not see which.

A blob is gone with its owner, or when its time is over. That is a `BlobLost`: the stage that made
it runs again.
"""

import asyncio
import functools
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import structlog

from shared.blobs import protocol as wire
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
from shared.config import BlobsConfig
from shared.errors import BlobLost, Unavailable
from shared.protocol import subjects
from shared.protocol.messages import BlobAddress, Heartbeat
from shared.protocol.multimodal import BlobRef

# Workers come and go; roads to those that are gone must not be kept for ever.
MAX_OWNERS = 64
# How long a list of neighbours is good for.
NEIGHBOURS_S = 2.0
# How often it is looked whether owners have gone, whose memory would last as long as we map it.
SWEEP_S = 1.0
# An owner that is frozen, or has just lost the broker, hears of it later; nobody waits for that.
RELEASE_PAUSES_S = (0.0, 0.5, 2.0)
RELEASE_S = 0.25

_log = structlog.get_logger()
_heartbeat = msgspec.json.Decoder(Heartbeat)


class Blobs:
    """One worker's blobs, and its roads to those of all others."""

    def __init__(self, bus: Bus, role: str, worker: str, config: BlobsConfig) -> None:
        self._bus = bus
        self._role = role
        self._worker = worker
        self._config = config
        self._server = BlobServer(worker, config.arena_mib * 2**20)
        self._pool = BufferPool(config.arena_mib * 2**20)
        self._roads: OrderedDict[str, list[Transport]] = OrderedDict()
        """By owner, the fastest first."""
        self._near: dict[str, BlobAddress] = {}
        self._look_again_s = 0.0
        self._sweeping: asyncio.Task[None] | None = None
        self._releasing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        config = self._config
        self._server.start()
        if config.listen is not None:
            self._server.listen((config.listen, config.port), config.advertise or config.listen)
        await self._bus.add_responder(subjects.blob(self._worker), self._answer)
        self._sweeping = asyncio.create_task(self._sweep())

    @property
    def address(self) -> BlobAddress:
        return self._server.address

    @property
    def capacity(self) -> int:
        """Bytes; what is larger never finds room."""
        return self._server.arena.slots.capacity

    def load(self) -> dict[str, float]:
        """What a heartbeat tells of them."""
        slots = self._server.arena.slots
        return {"arena_pinned": slots.num_pinned, "arena_bytes": slots.capacity - slots.num_free}

    async def close(self) -> None:
        for task in (self._sweeping, *self._releasing):
            if task is not None:
                task.cancel()
        self._close_roads()
        await self._server.close()

    # -- giving -------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer], ttl_s: float) -> BlobRef | None:
        """Keep the content, `parts` one after the other, for `ttl_s`; None if there is no room.

        `name` is a hash of the content, 64 hexadecimal digits: what is here already is not copied
        again.
        """
        return self._server.put(name, parts, ttl_s)

    async def find(self, name: str, ttl_s: float) -> BlobRef | None:
        """A reference to what has been put under this name, by us or by another worker of our role
        on this machine, if it is still there."""
        if (ours := self._server.find(name, ttl_s)) is not None:
            return ours
        for worker, address in (await self._neighbours()).items():
            road = self._local_road(worker, address)
            try:
                if (found := await road.find(name, ttl_s)) is not None:
                    return BlobRef(worker, *found)
            except (OSError, TimeoutError, ValueError):
                continue
        # Another task may have put it here while the neighbours were asked.
        return self._server.find(name, ttl_s)

    async def _neighbours(self) -> dict[str, BlobAddress]:
        """Other workers of our role whose memory we can map, as of a moment ago."""
        now_s = time.monotonic()
        if now_s > self._look_again_s:
            self._look_again_s = now_s + NEIGHBOURS_S
            beats = [_heartbeat.decode(data) for data in await self._bus.read_heartbeats()]
            self._near = {
                beat.worker: beat.blobs
                for beat in beats
                if beat.role == self._role
                and beat.worker != self._worker
                and beat.blobs is not None
                and beat.blobs.host == self.address.host
            }
        return self._near

    def _local_road(self, worker: str, address: BlobAddress) -> SharedMemoryTransport:
        roads = self._keep_roads(worker, address)
        assert isinstance(roads[0], SharedMemoryTransport)
        return roads[0]

    def _answer(self, question: bytes) -> bytes:
        """To a piece of a blob over the broker; empty if there is none."""
        piece = wire.unpack_chunk(question)
        if piece is None or piece.num_bytes > CHUNK_BYTES:
            return b""
        if piece.operation == wire.RELEASE:
            self._server.release(piece.key)
            return b""
        if piece.operation == wire.ACKNOWLEDGE:
            self._server.acknowledge(piece.key)
            return b""
        reader = "broker"
        slot = self._server.open(piece.key, reader)
        if slot is None:
            return b""
        view = self._server.arena.view(slot)[piece.offset : piece.offset + piece.num_bytes]
        self._server.arena.slots.unpin_all(reader)
        return bytes(view)

    def discard(self, ref: BlobRef) -> None:
        """Take back what has not been given to anybody."""
        self._server.release(ref.key)

    def clear(self) -> None:
        """Forget all that has been put, and the way to everybody else."""
        self._close_roads()
        self._server.clear()

    def _close_roads(self) -> None:
        for roads in self._roads.values():
            for road in roads:
                road.close()
        self._roads.clear()

    # -- having -------------------------------------------------------------------------------

    async def get(self, ref: BlobRef) -> Blob:
        """Raises BlobLost when it is gone, or no road leads to its owner."""
        if ref.worker == self._worker:
            return self._get_own(ref)
        for road in await self._roads_to(ref.worker):
            try:
                return await road.get(ref)
            except (OSError, TimeoutError, ValueError, Unavailable) as error:
                _log.warning(
                    "road_failed",
                    road=type(road).__name__,
                    owner=ref.worker,
                    error=str(error) or type(error).__name__,
                )
        raise BlobLost("a payload cannot be had from where it was kept")

    async def acknowledge(self, ref: BlobRef) -> None:
        """Somebody has had it: its owner may use the memory for something else if it must. Others
        may ask for it by the same reference as long as it has not."""
        if ref.worker == self._worker:
            self._server.acknowledge(ref.key)
        else:
            await self._tell(ref, wire.ACKNOWLEDGE)

    async def release(self, ref: BlobRef) -> None:
        """Nobody will ask for it by this reference again; returns when the owner knows, or soon. If
        it never hears of it, the reference lasts until its time is over."""
        if ref.worker == self._worker:
            self.discard(ref)
            return
        task = asyncio.create_task(self._release(ref))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        await asyncio.wait({task}, timeout=RELEASE_S)

    async def _release(self, ref: BlobRef) -> None:
        for pause_s in RELEASE_PAUSES_S:
            await asyncio.sleep(pause_s)
            if await self._tell(ref, wire.RELEASE):
                return

    async def _tell(self, ref: BlobRef, operation: wire.BlobOperation) -> bool:
        """Whether its owner has heard of it."""
        try:
            roads = await self._roads_to(ref.worker)
        except Unavailable:
            return False
        for road in roads:
            try:
                await road.send(ref, operation)
                return True
            except (OSError, TimeoutError, ValueError, Unavailable):
                continue
        return False

    def _get_own(self, ref: BlobRef) -> Blob:
        reader = f"self-{secrets.token_hex(8)}"
        slot = self._server.open(ref.key, reader)
        if slot is None:
            raise BlobLost("a payload has expired where it was kept")
        arena = self._server.arena
        return Blob(arena.view(slot), functools.partial(arena.slots.unpin_all, reader))

    async def _roads_to(self, owner: str) -> list[Transport]:
        if not subjects.is_name(owner):  # it becomes part of a subject
            return []
        if owner not in self._roads:
            address = await self._address_of(owner)
            if address is None:
                # It may live all the same, when the broker has just forgotten all heartbeats.
                return [BusTransport(self._bus, owner, self._pool)]
            return self._keep_roads(owner, address)
        self._roads.move_to_end(owner)
        return self._roads[owner]

    def _keep_roads(self, owner: str, address: BlobAddress) -> list[Transport]:
        # Somebody else may have asked meanwhile.
        if owner not in self._roads:
            self._roads[owner] = self._make_roads(owner, address)
            if len(self._roads) > MAX_OWNERS:
                _, oldest = self._roads.popitem(last=False)
                for road in oldest:
                    road.close()
        self._roads.move_to_end(owner)
        return self._roads[owner]

    def _make_roads(self, owner: str, address: BlobAddress) -> list[Transport]:
        roads: list[Transport] = []
        if address.host == self.address.host:
            roads.append(SharedMemoryTransport(address.local))
        if address.tcp is not None:
            roads.append(TcpTransport(address.tcp, self._pool))
        return [*roads, BusTransport(self._bus, owner, self._pool)]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for owner, roads in list(self._roads.items()):
                if any(road.ended for road in roads):
                    del self._roads[owner]
                    for road in roads:
                        road.close()

    async def _address_of(self, owner: str) -> BlobAddress | None:
        stored = await self._bus.read_last(subjects.WORKERS_STREAM, subjects.heartbeat(owner))
        return None if stored is None else _heartbeat.decode(stored.data).blobs
