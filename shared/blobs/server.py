"""The owner's side of blobs: keeps them in an arena, and gives them to whoever has a key.

A key is 32 random bytes. It travels with the message that needs the blob, and is good until it is
released or expires; the blob's slot stays pinned as long. A local reader's connection pins what it
is reading, too, so nothing changes under its eyes and its death frees it.
"""

import asyncio
import contextlib
import math
import os
import secrets
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from shared.blobs import protocol as wire
from shared.blobs.arena import Arena, Buffer
from shared.blobs.slot_allocator import Slot
from shared.protocol.messages import BlobAddress
from shared.protocol.multimodal import BlobRef

BACKLOG = 128
# For one blob over a socket; a reader that takes longer is taken to be gone.
SEND_TIMEOUT_S = 60.0

_log = structlog.get_logger()


@dataclass(slots=True)
class _Lease:
    name: str
    expiry: asyncio.TimerHandle
    """Ends the lease; until then its key pins the slot, unless it has been acknowledged."""


class BlobServer:
    def __init__(self, worker: str, capacity: int) -> None:
        self._worker = worker
        self.arena = Arena(capacity)
        self._leases: dict[bytes, _Lease] = {}
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = BlobAddress(host_id(), f"pagemill-{secrets.token_hex(16)}")

    # -- keeping ------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer], ttl_s: float) -> BlobRef | None:
        """Keep a copy of the content, `parts` in a row; None if there is no room for it.

        `name` stands for the content: what has this name already is not copied again.
        """
        key = secrets.token_bytes(wire.KEY_BYTES)
        return self._lease(key, self.arena.put(name, parts, key.hex()), ttl_s)

    def find(self, name: str, ttl_s: float) -> BlobRef | None:
        """A further reference to the blob of this name, if it is still here."""
        key = secrets.token_bytes(wire.KEY_BYTES)
        return self._lease(key, self.arena.slots.pin(name, key.hex()), ttl_s)

    def open(self, key: bytes, reader: str) -> Slot | None:
        """The slot, pinned by `reader` as well; None for a key that was never given, or is over."""
        lease = self._leases.get(key)
        return None if lease is None else self.arena.slots.pin(lease.name, reader)

    def acknowledge(self, key: bytes) -> None:
        """Somebody has had it: from now on it is in the arena as long as there is room for it."""
        if (lease := self._leases.get(key)) is not None:
            self.arena.slots.unpin(lease.name, key.hex())

    def release(self, key: bytes) -> None:
        if (lease := self._leases.pop(key, None)) is not None:
            lease.expiry.cancel()
            self.arena.slots.unpin(lease.name, key.hex())

    def clear(self) -> None:
        """Take everything back that nobody is reading just now."""
        for key in list(self._leases):
            self.release(key)
        self.arena.slots.clear()

    def _lease(self, key: bytes, slot: Slot | None, ttl_s: float) -> BlobRef | None:
        if slot is None:
            return None
        expiry = asyncio.get_running_loop().call_later(ttl_s, self.release, key)
        self._leases[key] = _Lease(slot.name, expiry)
        return BlobRef(self._worker, key, slot.num_bytes)

    # -- serving ------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve the readers of this machine."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + self.address.local)
        self._accept_from(listener)

    def listen(self, bind: tuple[str, int], name: str) -> None:
        """Serve the readers of other machines, to whom this one is known as `name`."""
        listener = socket.create_server(bind)
        self._accept_from(listener)
        port: int = listener.getsockname()[1]
        self.address = msgspec.structs.replace(self.address, tcp=(name, port))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self.clear()
        self.arena.close()

    def _accept_from(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listeners.append(listener)
        self._spawn(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of file descriptors: some will be closed.
                _log.warning("blob_reader_not_accepted", error=str(error))
                await asyncio.sleep(1)
            else:
                self._spawn(_Reader(self, sock).serve())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Reader:
    """A connection of somebody who reads our blobs."""

    def __init__(self, server: BlobServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._local = sock.family == socket.AF_UNIX
        self._name = f"reader-{secrets.token_hex(8)}"
        self._reading: dict[bytes, str] = {}
        """By key, the blobs that a local reader has under its eyes."""

    async def serve(self) -> None:
        try:
            with self._sock, contextlib.suppress(OSError, TimeoutError):
                if not self._local:
                    self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await asyncio.get_running_loop().sock_sendall(self._sock, wire.HELLO)
                elif self._may_map():
                    # A few bytes into an empty buffer: this does not block.
                    socket.send_fds(self._sock, [wire.HELLO], [self._server.arena.fd])
                else:
                    return
                while await self._answer(await wire.read_request(self._sock)):
                    pass
        finally:
            for key in list(self._reading):
                self._done(key)

    def _may_map(self) -> bool:
        if wire.is_same_user(self._sock):
            return True
        _log.warning("blob_reader_refused", reason="it runs as another user")
        return False

    async def _answer(self, question: wire.BlobRequest) -> bool:
        """False for what is no question."""
        match question.operation:
            case wire.GET:
                await self._give(question.key)
            case wire.DONE:
                self._done(question.key)
                await wire.send_reply(self._sock, wire.BlobReply(True))
            case wire.ACKNOWLEDGE:
                self._server.acknowledge(question.key)
                await wire.send_reply(self._sock, wire.BlobReply(True))
            case wire.RELEASE:
                self._server.release(question.key)
                await wire.send_reply(self._sock, wire.BlobReply(True))
            # A name is no permission; and whoever shares our memory could look for it there.
            case wire.FIND if self._local and 0 <= question.ttl_s < math.inf:
                await self._find(question)
            case _:
                return False
        return True

    async def _give(self, key: bytes) -> None:
        slot = self._server.open(key, self._holder(key))
        if slot is None:
            await wire.send_reply(self._sock, wire.BlobReply(False))
            return
        self._reading[key] = slot.name
        await wire.send_reply(self._sock, wire.BlobReply(True, slot.offset, slot.num_bytes))
        if not self._local:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                view = self._server.arena.view(slot)
                await asyncio.get_running_loop().sock_sendall(self._sock, view)
            self._done(key)

    async def _find(self, question: wire.BlobRequest) -> None:
        ref = self._server.find(question.key.hex(), question.ttl_s)
        try:
            await wire.send_reply(self._sock, _found(ref))
        except BaseException:
            # Nobody else has this key.
            if ref is not None:
                self._server.release(ref.key)
            raise

    def _done(self, key: bytes) -> None:
        if (name := self._reading.pop(key, None)) is not None:
            self._server.arena.slots.unpin(name, self._holder(key))

    def _holder(self, key: bytes) -> str:
        return f"{self._name}:{key.hex()}"


def _found(ref: BlobRef | None) -> wire.BlobReply:
    return wire.BlobReply(False) if ref is None else wire.BlobReply(True, 0, ref.num_bytes, ref.key)


def host_id() -> str:
    """Differs between machines, their boots, and network namespaces of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
