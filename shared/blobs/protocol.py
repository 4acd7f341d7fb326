"""Protocol between a reader of blobs and their owner.

On a socket the owner begins with `HELLO`; on a local socket it also passes the file descriptor of
its arena. Then the reader sends requests one by one: an operation, 32 bytes with a key or a name,
and a time to live. Each reply has a status, the blob's position in the arena, and a key. Over TCP
the bytes follow the reply to `GET`. A local reader reads them in its mapping, where they stay
pinned until it sends `DONE` or the connection ends.
"""

import asyncio
import os
import socket
import struct
from typing import Literal, NamedTuple

HELLO = b"PMB1"
KEY_BYTES = 32

BlobOperation = Literal[b"G", b"D", b"A", b"R", b"F"]
GET: BlobOperation = b"G"
"""Read the blob with this key."""
DONE: BlobOperation = b"D"
"""End the reading of this key's blob, which unpins it."""
ACKNOWLEDGE: BlobOperation = b"A"
"""Allow eviction, because one reader has received the blob. The key is valid until then."""
RELEASE: BlobOperation = b"R"
"""End the validity of this key."""
FIND: BlobOperation = b"F"
"""Request a new key, valid for the given time, and the size of the blob with this name."""

_request = struct.Struct(f"<c{KEY_BYTES}sf")
_reply = struct.Struct(f"<BQQ{KEY_BYTES}s")
_credentials = struct.Struct("3i")  # pid, uid, gid; see SO_PEERCRED in unix(7)
NO_KEY = bytes(KEY_BYTES)


class BlobReply(NamedTuple):
    """The owner's reply to a request over a socket."""

    is_valid: bool
    """Whether the owner has the blob."""
    offset: int = 0
    num_bytes: int = 0
    key: bytes = NO_KEY


class BlobRequest(NamedTuple):
    """A request over a socket."""

    operation: bytes
    key: bytes
    """The key; for `FIND` the name, decoded from its hexadecimal digits."""
    ttl_s: float = 0.0
    """Validity of the key that `FIND` requests."""


def is_same_user(sock: socket.socket) -> bool:
    """Return whether the peer of a local connection runs as the same user as this process."""
    option = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size)
    uid: int = _credentials.unpack(option)[1]
    return uid == os.getuid()


async def send_request(sock: socket.socket, request: BlobRequest) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _request.pack(*request))


async def read_request(sock: socket.socket) -> BlobRequest:
    """Read one request. Raises ConnectionError at the end of the connection."""
    return BlobRequest(*_request.unpack(await _read_exactly(sock, _request.size)))


async def send_reply(sock: socket.socket, reply: BlobReply) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _reply.pack(*reply))


async def read_reply(sock: socket.socket) -> BlobReply:
    status, *rest = _reply.unpack(await _read_exactly(sock, _reply.size))
    return BlobReply(bool(status), *rest)


async def read_into(sock: socket.socket, buffer: memoryview) -> None:
    """Fill `buffer`. Raises ConnectionError when the connection ends before it is full."""
    loop = asyncio.get_running_loop()
    filled = 0
    while filled < buffer.nbytes:
        count = await loop.sock_recv_into(sock, buffer[filled:])
        if count == 0:
            raise ConnectionResetError("the peer has closed the connection")
        filled += count


async def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    await read_into(sock, memoryview(buffer))
    return bytes(buffer)


# -- over the broker, where each message is one complete request ----------------------------------

_chunk = struct.Struct(f"<c{KEY_BYTES}sQQ")


class BlobChunk(NamedTuple):
    """A request over the broker, for `num_bytes` of a blob from `offset` on."""

    operation: bytes
    key: bytes
    offset: int = 0
    num_bytes: int = 0


def pack_chunk(chunk: BlobChunk) -> bytes:
    return _chunk.pack(*chunk)


def unpack_chunk(data: bytes) -> BlobChunk | None:
    """Decode a request. Return None for any other data."""
    return BlobChunk(*_chunk.unpack(data)) if len(data) == _chunk.size else None
