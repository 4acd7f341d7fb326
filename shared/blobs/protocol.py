"""What a reader of blobs and their owner say to each other over a socket.

The owner begins, with `HELLO`; on a local socket the file descriptor of the arena comes with it.
Then the reader asks, one question after the other: an operation, 32 bytes that are a key or a name,
and a time. Each is answered by a status, the blob's place in the arena, and a key. Over TCP the
bytes follow the answer to `GET`; a local reader has them in its mapping, pinned until it says
`DONE` or the connection ends.
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
"""Have the blob of this key."""
DONE: BlobOperation = b"D"
"""It has been read."""
ACKNOWLEDGE: BlobOperation = b"A"
"""Somebody has had it. The key is good as long as the owner needs the memory for nothing else."""
RELEASE: BlobOperation = b"R"
"""Nobody will ask for this key again."""
FIND: BlobOperation = b"F"
"""A key, good for so many seconds, to the blob of this name, and its size."""

_request = struct.Struct(f"<c{KEY_BYTES}sf")
_reply = struct.Struct(f"<BQQ{KEY_BYTES}s")
_credentials = struct.Struct("3i")  # pid, uid, gid; see SO_PEERCRED in unix(7)
NO_KEY = bytes(KEY_BYTES)


class BlobReply(NamedTuple):
    found: bool
    offset: int = 0
    num_bytes: int = 0
    key: bytes = NO_KEY


class BlobRequest(NamedTuple):
    operation: bytes
    key: bytes
    """Or a name, of which these are the bytes of its hexadecimal digits."""
    ttl_s: float = 0.0


def is_same_user(sock: socket.socket) -> bool:
    """Whether the other end of a local connection runs as the same user as we do."""
    option = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size)
    uid: int = _credentials.unpack(option)[1]
    return uid == os.getuid()


async def send_request(sock: socket.socket, question: BlobRequest) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _request.pack(*question))


async def read_request(sock: socket.socket) -> BlobRequest:
    """Raises ConnectionError at the end of the connection."""
    return BlobRequest(*_request.unpack(await _read_exactly(sock, _request.size)))


async def send_reply(sock: socket.socket, answer: BlobReply) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _reply.pack(*answer))


async def read_reply(sock: socket.socket) -> BlobReply:
    found, *rest = _reply.unpack(await _read_exactly(sock, _reply.size))
    return BlobReply(bool(found), *rest)


async def read_into(sock: socket.socket, buffer: memoryview) -> None:
    """Raises ConnectionError when the connection ends before `buffer` is full."""
    loop = asyncio.get_running_loop()
    filled = 0
    while filled < buffer.nbytes:
        count = await loop.sock_recv_into(sock, buffer[filled:])
        if count == 0:
            raise ConnectionResetError("the other side has closed the connection")
        filled += count


async def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    await read_into(sock, memoryview(buffer))
    return bytes(buffer)


# -- over the broker, where a message is a whole question -----------------------------------------

_chunk = struct.Struct(f"<c{KEY_BYTES}sQQ")


class BlobChunk(NamedTuple):
    operation: bytes
    key: bytes
    offset: int = 0
    num_bytes: int = 0


def pack_chunk(piece: BlobChunk) -> bytes:
    return _chunk.pack(*piece)


def unpack_chunk(data: bytes) -> BlobChunk | None:
    """None for what is no question."""
    return BlobChunk(*_chunk.unpack(data)) if len(data) == _chunk.size else None
