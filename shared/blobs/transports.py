"""The roads on which a reader has the blobs of one worker: its memory, a socket, the broker."""

import asyncio
import contextlib
import functools
import socket
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from shared.blobs import protocol as wire
from shared.blobs.arena import MappedArena
from shared.blobs.buffer_pool import BufferPool
from shared.bus.bus import Bus
from shared.errors import BlobLost
from shared.protocol import subjects
from shared.protocol.multimodal import BlobRef

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 2.0
# After an owner has not answered, those who wait for their turn take another road at once.
REST_S = 2.0
# A tenth of what a line of one gigabit carries.
MIN_BYTES_S = 12 * 2**20
# Of a message over the broker, which does best well below its limit; four keep the line full.
CHUNK_BYTES = 512 * 2**10
CHUNKS_UNDER_WAY = 4


class Blob:
    """A payload under the reader's eyes until `close`; `data` is read-only."""

    def __init__(self, data: memoryview, on_close: Callable[[], None]) -> None:
        self.data = data
        self._on_close: Callable[[], None] | None = on_close

    def close(self) -> None:
        """Nobody may look at `data` any more. A second call does nothing."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Transport(Protocol):
    """Raises BlobLost when the owner says that it has the blob no more, and OSError, TimeoutError
    or ValueError when the road itself fails."""

    async def get(self, ref: BlobRef) -> Blob: ...
    async def send(self, ref: BlobRef, operation: wire.BlobOperation) -> None: ...
    def close(self) -> None: ...
    @property
    def ended(self) -> bool:
        """It was open, and the owner has closed it or is dead."""
        ...


class _SocketTransport:
    """One connection, on which one question is asked at a time; made again after a failure."""

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._rests_until_s = 0.0

    async def send(self, ref: BlobRef, operation: wire.BlobOperation) -> None:
        async with self._turn:
            await self._ask(wire.BlobRequest(operation, ref.key))

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    @property
    def ended(self) -> bool:
        return self._sock is not None and not self._turn.locked() and _is_over(self._sock)

    async def _ask(self, question: wire.BlobRequest) -> wire.BlobReply:
        """While having the turn. After whatever goes wrong the connection is not used again: an
        answer that was not waited for would be taken for that to the next question."""
        if time.monotonic() < self._rests_until_s:
            raise ConnectionError("the owner did not answer a moment ago")
        try:
            if self._sock is None:
                self._sock = await self._connected()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await wire.send_request(self._sock, question)
                return await wire.read_reply(self._sock)
        except BaseException as error:
            if isinstance(error, TimeoutError):
                self._rests_until_s = time.monotonic() + REST_S
            self.close()
            raise

    async def _connected(self) -> socket.socket:
        connecting = asyncio.create_task(asyncio.to_thread(self._connect))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # The thread goes on, and nobody waits for what it brings.
            connecting.add_done_callback(_close_result)
            raise

    async def _ask_for(self, ref: BlobRef) -> wire.BlobReply:
        answer = await self._ask(wire.BlobRequest(wire.GET, ref.key))
        if not answer.found:
            raise BlobLost("a payload has expired where it was kept")
        if answer.num_bytes != ref.num_bytes:
            self.close()
            raise ValueError(f"a blob of {answer.num_bytes} bytes instead of {ref.num_bytes}")
        return answer

    def _connect(self) -> socket.socket:
        raise NotImplementedError


def _is_over(sock: socket.socket) -> bool:
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
    """The owner's memory, mapped: the bytes are where the owner has put them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._arena: MappedArena | None = None
        self._reading: Counter[bytes] = Counter()
        """By key, how often; of the present connection."""
        self._telling: set[asyncio.Task[None]] = set()

    async def get(self, ref: BlobRef) -> Blob:
        async with self._turn:
            answer = await self._ask_for(ref)
            if self._arena is None or self._sock is None:
                raise ConnectionResetError("the road has been closed meanwhile")
            data = self._arena.view(answer.offset, answer.num_bytes)
            self._reading[ref.key] += 1
            done = functools.partial(self._done, self._sock, self._reading, ref.key)
            return Blob(data, done)

    async def find(self, name: str, ttl_s: float) -> tuple[bytes, int] | None:
        """A key to the owner's blob of this name, and its size."""
        async with self._turn:
            answer = await self._ask(wire.BlobRequest(wire.FIND, bytes.fromhex(name), ttl_s))
        return (answer.key, answer.num_bytes) if answer.found else None

    def close(self) -> None:
        sock, self._sock = self._sock, None
        # What is being read keeps the mapping for itself.
        self._arena = None
        # And it keeps the connection, whose end would tell the owner that nobody reads any more:
        # it would put something else there.
        if sock is not None and not self._reading:
            sock.close()

    def _done(self, sock: socket.socket, reading: Counter[bytes], key: bytes) -> None:
        reading[key] -= 1
        if reading[key]:
            return
        del reading[key]
        if sock is self._sock:
            task = asyncio.create_task(self._tell_done(sock, key))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        elif not reading:
            # The last one of an earlier connection, and the end of that says it all.
            sock.close()

    async def _tell_done(self, sock: socket.socket, key: bytes) -> None:
        async with self._turn:
            if sock is self._sock and not self._reading[key]:
                with contextlib.suppress(OSError, TimeoutError):
                    await self._ask(wire.BlobRequest(wire.DONE, key))

    def _connect(self) -> socket.socket:
        self._reading = Counter()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect("\0" + self._name)
            # Once its owner is gone, anybody may take the name.
            if not wire.is_same_user(sock):
                raise ValueError("who listens there runs as another user")
            hello, fds, _, _ = socket.recv_fds(sock, len(wire.HELLO), 1)
            if hello != wire.HELLO or len(fds) != 1:
                raise ValueError("who listens there does not speak of blobs")
            self._arena = MappedArena(fds[0])
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock


class TcpTransport(_SocketTransport):
    """A connection to the owner's machine; received into memory that is used again."""

    def __init__(self, address: tuple[str, int], pool: BufferPool) -> None:
        super().__init__()
        self._address = address
        self._pool = pool

    async def get(self, ref: BlobRef) -> Blob:
        async with self._turn:
            await self._ask_for(ref)
            assert self._sock is not None
            buffer = self._pool.acquire(ref.num_bytes)
            data = memoryview(buffer)[: ref.num_bytes]
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S + ref.num_bytes / MIN_BYTES_S):
                    await wire.read_into(self._sock, data)
            except BaseException:
                self.close()
                raise
        return Blob(data.toreadonly(), functools.partial(self._pool.release, buffer))

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, CONNECT_TIMEOUT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.recv(len(wire.HELLO), socket.MSG_WAITALL) != wire.HELLO:
                raise ValueError("who listens there does not speak of blobs")
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock


class BusTransport:
    """Pieces of it, asked for a few at a time: where there is no other way between two workers."""

    def __init__(self, bus: Bus, worker: str, pool: BufferPool) -> None:
        self._bus = bus
        self._subject = subjects.blob(worker)
        self._pool = pool

    async def get(self, ref: BlobRef) -> Blob:
        buffer = self._pool.acquire(ref.num_bytes)
        data = memoryview(buffer)[: ref.num_bytes]
        credit = asyncio.Semaphore(CHUNKS_UNDER_WAY)

        async def fetch(offset: int) -> None:
            num_bytes = min(CHUNK_BYTES, ref.num_bytes - offset)
            async with credit:
                question = wire.pack_chunk(wire.BlobChunk(wire.GET, ref.key, offset, num_bytes))
                piece = await self._bus.request(self._subject, question, ANSWER_TIMEOUT_S)
            if len(piece) != num_bytes:
                raise BlobLost("a payload has expired where it was kept")
            data[offset : offset + num_bytes] = piece

        pieces = [
            asyncio.create_task(fetch(offset)) for offset in range(0, ref.num_bytes, CHUNK_BYTES)
        ]
        try:
            await asyncio.gather(*pieces)
        finally:
            for piece in pieces:
                piece.cancel()
        return Blob(data.toreadonly(), functools.partial(self._pool.release, buffer))

    async def send(self, ref: BlobRef, operation: wire.BlobOperation) -> None:
        question = wire.pack_chunk(wire.BlobChunk(operation, ref.key))
        await self._bus.request(self._subject, question, ANSWER_TIMEOUT_S)

    def close(self) -> None:
        pass

    @property
    def ended(self) -> bool:
        return False
