"""Transports for the blobs of one owner: its shared memory, a TCP connection, or the broker."""

import asyncio
import contextlib
import functools
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol, Self

from shared.blobs import protocol
from shared.blobs.arena import MappedArena
from shared.blobs.buffer_pool import BufferPool
from shared.bus.bus import Bus
from shared.errors import BlobLost
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.multimodal import BlobRef

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0
# Time after a timeout of the owner in which readers use another transport at once.
BACKOFF_S = 2.0
# A tenth of the rate of a 1 Gbit/s link.
MIN_BYTES_PER_S = 12 * 2**20
# Size of one message over the broker, which is fastest well below its limit. Four messages fill the
# connection.
CHUNK_BYTES = 512 * 2**10
MAX_CHUNKS_IN_FLIGHT = 4


class Blob:
    """A payload that a reader has open until `close`; `data` is read-only."""

    def __init__(self, data: memoryview, on_close: Callable[[], None]) -> None:
        self.data = data
        self._on_close: Callable[[], None] | None = on_close

    def close(self) -> None:
        """End the use of `data`. A second call does nothing."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport(Protocol):
    """Interface for reading the blobs of one owner.

    Methods raise BlobLost when the owner no longer has the blob, and OSError, TimeoutError or
    ValueError when the transport itself fails.
    """

    async def get(self, ref: BlobRef) -> Blob: ...
    async def send(self, ref: BlobRef, operation: protocol.BlobOperation) -> None: ...
    def close(self) -> None: ...
    @property
    def is_closed_by_owner(self) -> bool:
        """Whether an open connection was closed by the owner or by its death."""
        return False


class _SocketTransport:
    """One connection with one request at a time. A failed connection is replaced."""

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._blocked_until_s = 0.0

    async def send(self, ref: BlobRef, operation: protocol.BlobOperation) -> None:
        async with self._lock:
            await self._request(protocol.BlobRequest(operation, ref.key))

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    @property
    def is_closed_by_owner(self) -> bool:
        return self._sock is not None and not self._lock.locked() and _is_closed(self._sock)

    async def _request(self, request: protocol.BlobRequest) -> protocol.BlobReply:
        """Send a request and return its reply. The caller holds the lock.

        After any failure the connection is closed, because a late reply would be mistaken for the
        reply to the next request.
        """
        if time.monotonic() < self._blocked_until_s:
            raise ConnectionError("the owner did not reply a moment ago")
        try:
            if self._sock is None:
                self._sock = await self._open_socket()
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await protocol.send_request(self._sock, request)
                return await protocol.read_reply(self._sock)
        except BaseException as error:
            if isinstance(error, TimeoutError):
                self._blocked_until_s = time.monotonic() + BACKOFF_S
            self.close()
            raise

    async def _open_socket(self) -> socket.socket:
        connecting = asyncio.create_task(asyncio.to_thread(self._connect))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # The thread continues, and no caller would close its socket.
            connecting.add_done_callback(_close_result)
            raise

    async def _request_blob(self, ref: BlobRef) -> protocol.BlobReply:
        reply = await self._request(protocol.BlobRequest(protocol.GET, ref.key))
        if not reply.is_valid:
            raise BlobLost("a payload has expired at its owner")
        if reply.num_bytes != ref.num_bytes:
            self.close()
            raise ValueError(f"a blob of {reply.num_bytes} bytes instead of {ref.num_bytes}")
        return reply

    def _connect(self) -> socket.socket:
        raise NotImplementedError


def _is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _close_result(connecting: asyncio.Task[socket.socket]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


class SharedMemoryTransport(_SocketTransport):
    """A mapping of the owner's memory, which is read without a copy."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._arena: MappedArena | None = None
        self._reading: Counter[bytes] = Counter()
        """Number of open blobs by key, on the present connection."""
        self._notifying = TaskSet()

    async def get(self, ref: BlobRef) -> Blob:
        async with self._lock:
            reply = await self._request_blob(ref)
            if self._arena is None or self._sock is None:
                raise ConnectionResetError("the transport was closed meanwhile")
            data = self._arena.view(reply.offset, reply.num_bytes)
            self._reading[ref.key] += 1
            on_close = functools.partial(self._finish_reading, self._sock, self._reading, ref.key)
            return Blob(data, on_close)

    async def find(self, name: str, ttl_s: float) -> tuple[bytes, int] | None:
        """Return a key to the owner's blob with this name, and its size; None if it has none."""
        async with self._lock:
            reply = await self._request(
                protocol.BlobRequest(protocol.FIND, bytes.fromhex(name), ttl_s)
            )
        return (reply.key, reply.num_bytes) if reply.is_valid else None

    def close(self) -> None:
        sock, self._sock = self._sock, None
        # Open blobs have references to the mapping.
        self._arena = None
        # They also need the connection: its end would unpin them, and the owner could overwrite
        # their memory.
        if sock is not None and not self._reading:
            sock.close()

    def _finish_reading(self, sock: socket.socket, reading: Counter[bytes], key: bytes) -> None:
        reading[key] -= 1
        if reading[key]:
            return
        del reading[key]
        if sock is self._sock:
            self._notifying.start(self._send_done(sock, key))
        elif not reading:
            # The last open blob of an earlier connection, whose end unpins it.
            sock.close()

    async def _send_done(self, sock: socket.socket, key: bytes) -> None:
        async with self._lock:
            if sock is self._sock and not self._reading[key]:
                with contextlib.suppress(OSError, TimeoutError):
                    await self._request(protocol.BlobRequest(protocol.DONE, key))

    def _connect(self) -> socket.socket:
        self._reading = Counter()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect("\0" + self._name)
            # Once the owner has exited, any process may bind its name.
            if not protocol.is_same_user(sock):
                raise ValueError("the listening process runs as another user")
            hello, fds, _, _ = socket.recv_fds(sock, len(protocol.HELLO), 1)
            if hello != protocol.HELLO or len(fds) != 1:
                raise ValueError("the listening process does not speak the blob protocol")
            self._arena = MappedArena(fds[0])
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock


class TcpTransport(_SocketTransport):
    """A TCP connection to the owner. Blobs are received into pooled buffers."""

    def __init__(self, address: tuple[str, int], pool: BufferPool) -> None:
        super().__init__()
        self._address = address
        self._pool = pool

    async def get(self, ref: BlobRef) -> Blob:
        async with self._lock:
            await self._request_blob(ref)
            assert self._sock is not None
            buffer = self._pool.acquire(ref.num_bytes)
            data = memoryview(buffer)[: ref.num_bytes]
            try:
                async with asyncio.timeout(REPLY_TIMEOUT_S + ref.num_bytes / MIN_BYTES_PER_S):
                    await protocol.read_into(self._sock, data)
            except BaseException:
                self.close()
                raise
        return Blob(data.toreadonly(), functools.partial(self._pool.release, buffer))

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, CONNECT_TIMEOUT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.recv(len(protocol.HELLO), socket.MSG_WAITALL) != protocol.HELLO:
                raise ValueError("the listening process does not speak the blob protocol")
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock


class BusTransport(Transport):
    """Chunks over the broker, a few at a time. This works without a direct connection."""

    def __init__(self, bus: Bus, worker: str, pool: BufferPool) -> None:
        self._bus = bus
        self._subject = subjects.blob(worker)
        self._pool = pool

    async def get(self, ref: BlobRef) -> Blob:
        buffer = self._pool.acquire(ref.num_bytes)
        data = memoryview(buffer)[: ref.num_bytes]
        credit = asyncio.Semaphore(MAX_CHUNKS_IN_FLIGHT)

        async def fetch(offset: int) -> None:
            num_bytes = min(CHUNK_BYTES, ref.num_bytes - offset)
            async with credit:
                request = protocol.pack_chunk(
                    protocol.BlobChunk(protocol.GET, ref.key, offset, num_bytes)
                )
                chunk = await self._bus.request(self._subject, request, REPLY_TIMEOUT_S)
            if len(chunk) != num_bytes:
                raise BlobLost("a payload has expired at its owner")
            data[offset : offset + num_bytes] = chunk

        fetches = [
            asyncio.create_task(fetch(offset)) for offset in range(0, ref.num_bytes, CHUNK_BYTES)
        ]
        try:
            await asyncio.gather(*fetches)
        finally:
            for fetching in fetches:
                fetching.cancel()
        return Blob(data.toreadonly(), functools.partial(self._pool.release, buffer))

    async def send(self, ref: BlobRef, operation: protocol.BlobOperation) -> None:
        request = protocol.pack_chunk(protocol.BlobChunk(operation, ref.key))
        await self._bus.request(self._subject, request, REPLY_TIMEOUT_S)

    def close(self) -> None:
        pass
