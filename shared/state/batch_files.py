"""Input files of batches. They are in the stream of batches, which deletes nothing to make room.

An upload arrives in the stream of media, because the purpose of a file may follow its content. Then
its chunks are moved here. As there, the name of a file is the SHA-256 of its bytes.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice

from msgspec.structs import replace

from shared.batches.input_file import LineCutter, RawLine
from shared.bus.bus import Bus
from shared.bus.streams import MEDIA_REUSE_S
from shared.errors import NotFound
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import MediaHead, decode_media_head
from shared.protocol.requests import tenant_header
from shared.state import batch_room, media_store
from shared.state.media_store import CHUNK_BYTES, MAX_CHUNKS_IN_FLIGHT, StoredFile

MAX_LENT = 256
"""Limit on the files of one request. More than any request may use are ignored."""
_FILE_NAME = re.compile(rb"(?:media:|file-)([0-9a-f]{64})")


async def adopt(bus: Bus, name: str, head: MediaHead, expires_s: int, tenant: str) -> StoredFile:
    """Move an uploaded file to the input files, before its head is stored.

    An equal file is replaced, and stored for the longer of the two times. Raises Overloaded if the
    stream is full, and Unavailable.
    """

    async def read(number: int) -> bytes:
        chunk = await bus.read_last(
            subjects.MEDIA_STREAM, subjects.media_chunk(head.chunks or name, number)
        )
        if chunk is None:
            raise NotFound("the file was removed while it was stored")
        return chunk.data

    stored = replace(head, chunks=None, expires_s=expires_s)
    file = await _write(bus, name, stored, read, tenant)
    await bus.purge(subjects.MEDIA_STREAM, subjects.media_chunks(head.chunks or name))
    return file


async def store(bus: Bus, content: bytes, expires_s: int, tenant: str) -> StoredFile:
    """Store an input file that came in one message. Raises like `adopt`."""
    num_chunks = math.ceil(len(content) / CHUNK_BYTES)
    head = MediaHead(len(content), num_chunks, None, None, "batch", expires_s)

    async def read(number: int) -> bytes:
        return content[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    return await _write(bus, await media_store.hash_media(content), head, read, tenant)


async def _write(
    bus: Bus,
    name: str,
    head: MediaHead,
    read: Callable[[int], Awaitable[bytes]],
    tenant: str,
) -> StoredFile:
    """Write the chunks that `read` returns by their numbers, and then the head of the file.

    A file that is stored for longer keeps its time, because a batch may need it until then.
    """
    before = await look_up(bus, name, tenant)
    if before is not None:
        head = replace(head, expires_s=max(head.expires_s or 0, before.head.expires_s or 0))
    headers = replacing_headers(bus, head.expires_s or 0, tenant)
    credit = asyncio.Semaphore(MAX_CHUNKS_IN_FLIGHT)

    async def copy(number: int) -> None:
        async with credit:
            target, chunk = subjects.batch_file_chunk(tenant, name, number), await read(number)
            await batch_room.check(bus, len(chunk))
            await bus.publish_without_id(target, chunk, headers)

    try:
        await asyncio.gather(*(copy(number) for number in range(head.num_chunks)))
        await bus.publish_without_id(subjects.batch_file(tenant, name), to_json(head), headers)
    except BaseException:
        if before is None:
            await remove(bus, name, tenant)
        raise
    return StoredFile(name, head, bus.now_ms())


def replacing_headers(bus: Bus, expires_s: int, tenant: str) -> dict[str, str]:
    """Return headers of a message that expires, and replaces earlier messages of its subject."""
    ttl_s = max(1, round(expires_s - bus.now_ms() / 1000))
    return tenant_header(tenant) | {"Nats-Rollup": "sub", "Nats-TTL": f"{ttl_s}s"}


class MediaLender:
    """Stores the input files that lines name as media, where renderers read them.

    Media expire within hours, and these files are stored for as long as their batch.
    """

    def __init__(self, bus: Bus, max_bytes: int) -> None:
        """Larger files than `max_bytes` are no media."""
        self._bus = bus
        self._max_bytes = max_bytes
        self._copying = asyncio.Lock()
        """Held during a copy. Many lines may name one file, which is in memory as a whole."""

    async def lend(self, body: bytes, tenant: str) -> None:
        """Store the files that the body of a request names.

        Raises NotFound, Overloaded or Unavailable.
        """
        names = dict.fromkeys(match[1].decode() for match in _FILE_NAME.finditer(body))
        for name in islice(names, MAX_LENT):
            file = await look_up(self._bus, name, tenant)
            if file is None or file.head.num_bytes > self._max_bytes:
                continue
            if not await self._is_lent(name, tenant):
                async with self._copying:
                    await self._copy(file, tenant)

    async def _is_lent(self, name: str, tenant: str) -> bool:
        media = await media_store.look_up(self._bus, name, tenant)
        return media is not None and self._bus.now_ms() - media.stored_ms <= 1000 * MEDIA_REUSE_S

    async def _copy(self, file: StoredFile, tenant: str) -> None:
        # Another line may have copied the file meanwhile.
        if not await self._is_lent(file.name, tenant):
            content = [data async for data, _ in read(self._bus, file, tenant)]
            await media_store.store(self._bus, file.name, b"".join(content), tenant)


async def look_up(bus: Bus, name: str, tenant: str) -> StoredFile | None:
    """Return an input file; None if it is not stored. Raises Unavailable."""
    subject = subjects.stored_batch(subjects.batch_file(tenant, name))
    stored = await bus.read_last(subjects.BATCHES_STREAM, subject)
    head = None if stored is None else decode_media_head(stored.data)
    return None if stored is None or head is None else StoredFile(name, head, stored.stored_ms)


async def remove(bus: Bus, name: str, tenant: str) -> None:
    """Remove a file. Batches in progress that read it fail. Raises Unavailable."""
    head = subjects.stored_batch(subjects.batch_file(tenant, name))
    await bus.purge(subjects.BATCHES_STREAM, head)
    chunks = subjects.stored_batch(subjects.batch_file_chunk(tenant, name, "*"))
    await bus.purge(subjects.BATCHES_STREAM, chunks)


async def read(
    bus: Bus, file: StoredFile, tenant: str, offset: int = 0
) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield the bytes of a file from `offset` on, in pieces, and whether each is the last.

    Raises NotFound if the file is removed meanwhile, and Unavailable.
    """
    numbers = range(offset // CHUNK_BYTES, file.head.num_chunks)
    if not numbers:
        yield b"", True
    for number in numbers:
        subject = subjects.stored_batch(subjects.batch_file_chunk(tenant, file.name, number))
        chunk = await bus.read_last(subjects.BATCHES_STREAM, subject)
        if chunk is None:
            raise NotFound("the input file is not stored any more", field="input_file_id")
        skipped = offset - number * CHUNK_BYTES if number == numbers[0] else 0
        yield chunk.data[skipped:], number == numbers[-1]


async def read_lines(
    bus: Bus, file: StoredFile, tenant: str, cutter: LineCutter
) -> AsyncIterator[RawLine]:
    """Yield the lines of a file from the position of `cutter` on. Raises like `read`."""
    async for data, is_last in read(bus, file, tenant, cutter.next_offset):
        for line in cutter.feed(data, is_last=is_last):
            yield line
