"""The owner's side of blobs: stores them in an arena, and serves them to readers with a key.

A key is 32 random bytes. It is sent in the message that needs the blob, and is valid until it is
released or expires; the blob's slot stays pinned for that time. The connection of a local reader
also pins the slots that it reads, so that their content does not change and the reader's death
unpins them.

Over TCP any client may connect, so a connection is a stranger until its first valid key. Strangers
have little time. When there are too many, the oldest is disconnected for a new one.
"""

import asyncio
import contextlib
import math
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from shared.blobs import protocol
from shared.blobs.arena import Arena, Buffer
from shared.blobs.slot_allocator import Slot
from shared.helpers.task_set import TaskSet
from shared.net import listening
from shared.protocol.messages import BlobAddress
from shared.protocol.multimodal import BlobRef

# Time for one blob over a socket. A slower reader counts as dead.
SEND_TIMEOUT_S = 60.0
# Over TCP: time until the first valid key, and between two requests. After a closed connection, a
# reader connects again for its next request.
KEY_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 300.0
MAX_STRANGERS = 64
MAX_READERS = 512

_log = structlog.get_logger()


@dataclass(slots=True)
class _Lease:
    """A valid key to the blob `name`."""

    name: str
    expiry: asyncio.TimerHandle
    """Timer that ends the lease. Until then its key pins the slot, unless it was acknowledged."""


class BlobServer:
    """The blobs of one worker, their keys, and the sockets on which readers connect."""

    def __init__(self, worker: str, capacity: int) -> None:
        self._worker = worker
        self.arena = Arena(capacity)
        self._leases: dict[bytes, _Lease] = {}
        self._listeners: list[socket.socket] = []
        self._tasks = TaskSet()
        self._strangers: dict[_ReaderConnection, asyncio.Task[None]] = {}
        """Connections over TCP without a valid key so far, the oldest first."""
        self._readers: set[_ReaderConnection] = set()
        """Connections over TCP that have sent a valid key."""
        self.address = BlobAddress(host_id(), f"pagemill-{secrets.token_hex(16)}")

    # -- storing ------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer], ttl_s: float) -> BlobRef | None:
        """Store a copy of the concatenated `parts`. Return None if there is no room for it.

        `name` identifies the content: a blob that is already stored under it is not copied again.
        """
        key = secrets.token_bytes(protocol.KEY_BYTES)
        return self._lease(key, self.arena.put(name, parts, key.hex()), ttl_s)

    def find(self, name: str, ttl_s: float) -> BlobRef | None:
        """Return another reference to the blob of this name, or None if it was evicted."""
        key = secrets.token_bytes(protocol.KEY_BYTES)
        return self._lease(key, self.arena.slots.pin(name, key.hex()), ttl_s)

    def open(self, key: bytes, reader: str) -> Slot | None:
        """Pin the key's slot for `reader` and return it; None for an unknown or expired key."""
        lease = self._leases.get(key)
        return None if lease is None else self.arena.slots.pin(lease.name, reader)

    def acknowledge(self, key: bytes) -> None:
        """Allow the eviction of the blob, because one reader has received it."""
        if (lease := self._leases.get(key)) is not None:
            self.arena.slots.unpin(lease.name, key.hex())

    def release(self, key: bytes) -> None:
        """End the validity of a key and unpin its slot. An unknown key is ignored."""
        if (lease := self._leases.pop(key, None)) is not None:
            lease.expiry.cancel()
            self.arena.slots.unpin(lease.name, key.hex())

    def clear(self) -> None:
        """Release all keys, and remove all blobs that have no reader."""
        self.release_all()
        self.arena.slots.clear()

    def release_all(self) -> None:
        """End the validity of all keys. Readers finish what they have opened."""
        for key in list(self._leases):
            self.release(key)

    def _lease(self, key: bytes, slot: Slot | None, ttl_s: float) -> BlobRef | None:
        if slot is None:
            return None
        expiry = asyncio.get_running_loop().call_later(ttl_s, self.release, key)
        self._leases[key] = _Lease(slot.name, expiry)
        return BlobRef(self._worker, key, slot.num_bytes)

    # -- serving ------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve readers on this machine."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + self.address.local)
        listener.listen(listening.BACKLOG)
        self._accept_on(listener)

    def listen(self, listener: socket.socket, name: str) -> None:
        """Serve readers on other machines, which connect to this one by `name`.

        `listener` is bound. Raises Unavailable if another socket listens at its address.
        """
        listening.listen("blobs", listener)
        self._accept_on(listener)
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

    def _accept_on(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._tasks.start(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # The process has no file descriptors left until some are closed.
                _log.warning("blob_reader_not_accepted", error=str(error))
                await asyncio.sleep(1)
            else:
                self._accepted(sock)

    def _accepted(self, sock: socket.socket) -> None:
        connection = _ReaderConnection(self, sock)
        serving = self._tasks.start(connection.serve())
        if sock.family == socket.AF_UNIX:
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).cancel()
        self._strangers[connection] = serving

    def recognize(self, connection: "_ReaderConnection", key: bytes) -> bool:
        """Return whether the connection has sent a valid key, now or before.

        Raises ConnectionError when there are too many readers.
        """
        if connection not in self._readers and key in self._leases:
            if len(self._readers) >= MAX_READERS:
                _log.warning("blob_reader_refused", reason=f"there are {MAX_READERS} readers")
                raise ConnectionRefusedError
            self._readers.add(connection)
            self._strangers.pop(connection, None)
        return connection in self._readers

    def forget(self, connection: "_ReaderConnection") -> None:
        self._readers.discard(connection)
        self._strangers.pop(connection, None)


class _ReaderConnection:
    """The connection of one reader."""

    def __init__(self, server: BlobServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._local = sock.family == socket.AF_UNIX
        self._name = f"reader-{secrets.token_hex(8)}"
        self._reading: dict[bytes, str] = {}
        """Names of the blobs that the reader has open, by key."""
        self._until_s = asyncio.get_running_loop().time() + KEY_TIMEOUT_S
        """Loop time at which the connection ends without a further request."""

    async def serve(self) -> None:
        try:
            with self._sock, contextlib.suppress(OSError, TimeoutError):
                if not self._local:
                    self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await asyncio.get_running_loop().sock_sendall(self._sock, protocol.HELLO)
                elif protocol.is_same_user(self._sock):
                    # This does not block, because a few bytes fit into an empty buffer.
                    socket.send_fds(self._sock, [protocol.HELLO], [self._server.arena.fd])
                else:
                    _log.warning("blob_reader_refused", reason="the reader runs as another user")
                    return
                while await self._handle(await self._next_request()):
                    pass
        finally:
            self._server.forget(self)
            for key in list(self._reading):
                self._finish_reading(key)

    async def _next_request(self) -> protocol.BlobRequest:
        if self._local:
            # Its connection pins the slots that it reads, and it runs as this user.
            return await protocol.read_request(self._sock)
        async with asyncio.timeout_at(self._until_s):
            request = await protocol.read_request(self._sock)
        if self._server.recognize(self, request.key):
            self._until_s = asyncio.get_running_loop().time() + IDLE_TIMEOUT_S
        return request

    async def _handle(self, request: protocol.BlobRequest) -> bool:
        """Execute a request. Return False if it is invalid."""
        match request.operation:
            case protocol.GET:
                await self._send_blob(request.key)
                return True
            # Only local readers may find blobs by name. A name grants no access, but a local reader
            # could scan the mapped memory anyway.
            case protocol.FIND if self._local and 0 <= request.ttl_s < math.inf:
                await self._find(request)
                return True
            case protocol.DONE:
                self._finish_reading(request.key)
            case protocol.ACKNOWLEDGE:
                self._server.acknowledge(request.key)
            case protocol.RELEASE:
                self._server.release(request.key)
            case _:
                return False
        await protocol.send_reply(self._sock, protocol.BlobReply(True))
        return True

    async def _send_blob(self, key: bytes) -> None:
        slot = self._server.open(key, self._holder(key))
        if slot is None:
            await protocol.send_reply(self._sock, protocol.BlobReply(False))
            return
        self._reading[key] = slot.name
        await protocol.send_reply(self._sock, protocol.BlobReply(True, slot.offset, slot.num_bytes))
        if not self._local:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                view = self._server.arena.view(slot)
                await asyncio.get_running_loop().sock_sendall(self._sock, view)
            self._finish_reading(key)

    async def _find(self, request: protocol.BlobRequest) -> None:
        ref = self._server.find(request.key.hex(), request.ttl_s)
        reply = protocol.BlobReply(False)
        if ref is not None:
            reply = protocol.BlobReply(True, 0, ref.num_bytes, ref.key)
        try:
            await protocol.send_reply(self._sock, reply)
        except BaseException:
            # The reader has not received the key, so no other process could release it.
            if ref is not None:
                self._server.release(ref.key)
            raise

    def _finish_reading(self, key: bytes) -> None:
        if (name := self._reading.pop(key, None)) is not None:
            self._server.arena.slots.unpin(name, self._holder(key))

    def _holder(self, key: bytes) -> str:
        return f"{self._name}:{key.hex()}"


def host_id() -> str:
    """Return an id that differs between machines, their boots and their network namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
