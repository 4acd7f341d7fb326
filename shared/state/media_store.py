"""Stream of media files. The name of a file is the SHA-256 of its bytes.

A file is stored as chunks, followed by a head. Readers verify the hash, so that no other bytes can
be served under a name. An incomplete file counts as missing.

A tenant can read only files that were stored for that tenant: the hash of a file does not give
access to it, and must not reveal whether another tenant has sent it.
"""

import asyncio
import hashlib
import re
import secrets
from dataclasses import dataclass

from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.streams import MEDIA_REUSE_S
from shared.errors import InvalidMedia, InvalidRequest, MediaNotFound, MediaTooLarge
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import MediaHead, decode_media_head
from shared.protocol.multimodal import MEDIA_SCHEME
from shared.protocol.reading import FilePage
from shared.protocol.requests import tenant_header

CHUNK_BYTES = 512 * 2**10
MAX_CHUNKS_IN_FLIGHT = 8
# A replica that serves reads may store a file a little later than its leader.
STALE_READ_S = 0.3

_URL = re.compile(r"media:(?:file-)?([0-9a-f]{64})")


def media_url(name: str) -> str:
    return MEDIA_SCHEME + name


def parse_media_url(url: str) -> str | None:
    """Return the name in a `media:` URL, with a name or a file's id; None for any other text."""
    match = _URL.fullmatch(url)
    return match and match.group(1)


async def hash_media(data: bytes) -> str:
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())


def storage_name(name: str, tenant: str) -> str:
    """Return the name of a tenant's file in the stream."""
    return hashlib.sha256(f"{tenant}:{name}".encode()).hexdigest() if tenant else name


async def store(bus: Bus, name: str, data: bytes, tenant: str = "", place: str = "") -> None:
    """Store `data` for longer than any request that begins now may take.

    A recently stored file is not written again. A file with a place replaces the file that was
    there before, which then counts as missing. Raises Unavailable.
    """
    stored_name = storage_name(name, tenant)
    chunks = storage_name(place, tenant or "place") if place else stored_name
    stored = await _find_head(bus, stored_name)
    if stored is not None and not place:
        head, stored_ms = stored
        is_recent = bus.now_ms() - stored_ms < 1000 * MEDIA_REUSE_S
        if is_recent and head.num_bytes == len(data):
            return
    starts = range(0, len(data), CHUNK_BYTES)
    credit = asyncio.Semaphore(MAX_CHUNKS_IN_FLIGHT)

    async def publish(number: int, start: int) -> None:
        async with credit:
            chunk = data[start : start + CHUNK_BYTES]
            subject = subjects.media_chunk(chunks, number)
            await bus.publish_without_id(subject, chunk, tenant_header(tenant))

    await asyncio.gather(*(publish(number, start) for number, start in enumerate(starts)))
    head = MediaHead(len(data), len(starts), chunks if place else None)
    if stored is not None and not place:
        head = replace(stored[0], num_bytes=len(data), num_chunks=len(starts), chunks=None)
    await bus.publish_without_id(subjects.media(stored_name), to_json(head), tenant_header(tenant))
    if head.filename is not None:
        await _mark_uploaded(bus, name, tenant)


async def store_url(bus: Bus, data: bytes, tenant: str = "", place: str = "") -> str:
    """Store a file as `store` does, and return its `media:` URL. Raises Unavailable."""
    name = await hash_media(data)
    await store(bus, name, data, tenant, place)
    return media_url(name)


async def find(bus: Bus, name: str, max_bytes: int, tenant: str = "") -> bytes | None:
    """Return the bytes of a file; None if it is missing or incomplete.

    Raises MediaTooLarge before more than `max_bytes` are read, or Unavailable.
    """
    data = await _read(bus, name, max_bytes, tenant)
    if data is None:
        await bus.wait_for_replicas(STALE_READ_S)
        data = await _read(bus, name, max_bytes, tenant)
    return data


async def read_stored(bus: Bus, url: str, field: str, max_bytes: int, tenant: str = "") -> bytes:
    """Return the file that a `media:` URL names. Raises a RequestError that names `field`."""
    name = parse_media_url(url)
    if name is None:
        raise InvalidMedia("expected media: and 64 lower-case hexadecimal digits", field=field)
    try:
        data = await find(bus, name, max_bytes, tenant)
    except MediaTooLarge as error:
        raise MediaTooLarge(error.message, field=field) from None
    if data is None:
        raise MediaNotFound("no file with this name is stored here", field=field)
    return data


async def _read(bus: Bus, name: str, max_bytes: int, tenant: str) -> bytes | None:
    stored_name = storage_name(name, tenant)
    stored = await _find_head(bus, stored_name)
    if stored is None:
        return None
    head, _ = stored
    chunks = head.chunks or stored_name
    if head.num_bytes > max_bytes:
        raise MediaTooLarge(
            f"a file of {head.num_bytes} bytes is over the limit of {max_bytes} bytes"
        )
    chunks_read: list[bytes] = []
    num_bytes = 0
    for first in range(0, head.num_chunks, MAX_CHUNKS_IN_FLIGHT):
        numbers = range(first, min(first + MAX_CHUNKS_IN_FLIGHT, head.num_chunks))
        reads = (
            bus.read_last(subjects.MEDIA_STREAM, subjects.media_chunk(chunks, n)) for n in numbers
        )
        for chunk in await asyncio.gather(*reads):
            if chunk is None or num_bytes + len(chunk.data) > head.num_bytes:
                return None
            chunks_read.append(chunk.data)
            num_bytes += len(chunk.data)
    content, content_name = await asyncio.to_thread(_join, chunks_read)
    return content if content_name == name else None


async def read_page(
    bus: Bus, name: str, start: int, max_bytes: int, tenant: str = ""
) -> FilePage | None:
    """Return a page of a file from byte `start` on; None if the file is missing or incomplete.

    The page has at most `max_bytes`. The hash of the file is not verified. Raises InvalidRequest
    for a `start` after the end of the file, and Unavailable.
    """
    page = await _read_range(bus, name, start, max_bytes, tenant)
    if page is None:
        await bus.wait_for_replicas(STALE_READ_S)
        page = await _read_range(bus, name, start, max_bytes, tenant)
    return page


async def _read_range(
    bus: Bus, name: str, start: int, max_bytes: int, tenant: str
) -> FilePage | None:
    stored_name = storage_name(name, tenant)
    stored = await _find_head(bus, stored_name)
    if stored is None:
        return None
    head, _ = stored
    chunks, num_bytes = head.chunks or stored_name, head.num_bytes
    if start > num_bytes:
        raise InvalidRequest(
            f"from: {start} is after the end of the file, which has {num_bytes} bytes", field="from"
        )
    if start == num_bytes:
        return FilePage(b"", start, num_bytes, ended=True)
    first = await bus.read_last(subjects.MEDIA_STREAM, subjects.media_chunk(chunks, 0))
    size = 0 if first is None else len(first.data)
    # All chunks have the size of the first one, except that the last one may be smaller.
    if not 0 < num_bytes - (head.num_chunks - 1) * size <= size:
        return None
    numbers = range(start // size, head.num_chunks)[:MAX_CHUNKS_IN_FLIGHT]
    end = min(start + max_bytes, numbers.stop * size, num_bytes)
    numbers = numbers[: (end - 1) // size + 1 - numbers.start]
    reads = (bus.read_last(subjects.MEDIA_STREAM, subjects.media_chunk(chunks, n)) for n in numbers)
    content = b"".join(chunk.data for chunk in await asyncio.gather(*reads) if chunk is not None)
    if len(content) != min(numbers.stop * size, num_bytes) - numbers.start * size:
        return None
    offset = numbers.start * size
    return FilePage(content[start - offset : end - offset], end, num_bytes, ended=end == num_bytes)


def _join(chunks: list[bytes]) -> tuple[bytes, str]:
    """Return all bytes and their name. Blocks while it copies and hashes them."""
    content = b"".join(chunks)
    return content, hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Name and head of a stored file."""

    name: str
    head: MediaHead
    stored_ms: float
    """Time of storage, in Unix milliseconds of the broker's clock."""


async def look_up(bus: Bus, name: str, tenant: str = "") -> StoredFile | None:
    """Return the name and head of a file; None if it is not stored. Raises Unavailable."""
    stored = await _find_head(bus, storage_name(name, tenant))
    return None if stored is None else StoredFile(name, *stored)


async def _mark_uploaded(bus: Bus, name: str, tenant: str) -> None:
    """Store the mark that lists of files find. The head of a file is found by its name alone."""
    subject = subjects.media_upload(tenant, name)
    await bus.publish_without_id(subject, b"", tenant_header(tenant))


async def remove(bus: Bus, file: StoredFile, tenant: str = "") -> None:
    """Remove a file. Requests in progress that use it may fail. Raises Unavailable."""
    stored_name = storage_name(file.name, tenant)
    await bus.purge(subjects.MEDIA_STREAM, subjects.media_upload(tenant, file.name))
    await bus.purge(subjects.MEDIA_STREAM, subjects.media(stored_name))
    chunks = file.head.chunks or stored_name
    await bus.purge(subjects.MEDIA_STREAM, subjects.media_chunks(chunks))


class MediaUpload:
    """Upload of a file, which is stored while it arrives, with at most one chunk in memory."""

    def __init__(self, bus: Bus, tenant: str = "") -> None:
        self._bus = bus
        self._tenant = tenant
        # The file's hash is known only at its end.
        self._chunks = secrets.token_hex(32)
        self._digest = hashlib.sha256()
        self._waiting = bytearray()
        self._num_chunks = 0
        self._may_be_named = False
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Append to the file. Raises Unavailable."""
        self._digest.update(data)
        self.num_bytes += len(data)
        self._waiting += data
        while len(self._waiting) >= CHUNK_BYTES:
            await self._publish(bytes(self._waiting[:CHUNK_BYTES]))
            del self._waiting[:CHUNK_BYTES]

    async def seal(
        self, filename: str | None = None, purpose: str | None = None
    ) -> tuple[str, MediaHead]:
        """Store the last chunk, and return the name and the head of the file. Raises Unavailable.

        The file is not available before the head is stored.
        """
        if self._waiting:
            await self._publish(bytes(self._waiting))
            self._waiting.clear()
        head = MediaHead(self.num_bytes, self._num_chunks, self._chunks, filename, purpose)
        return self._digest.hexdigest(), head

    async def finish(self, filename: str | None = None, purpose: str | None = None) -> StoredFile:
        """Make the file available under its name. Raises Unavailable."""
        name, head = await self.seal(filename, purpose)
        before = await look_up(self._bus, name, self._tenant)
        subject = subjects.media(storage_name(name, self._tenant))
        # The head may be stored although its acknowledgement is lost.
        self._may_be_named = True
        await self._bus.publish_without_id(subject, to_json(head), tenant_header(self._tenant))
        if before is not None and before.head.chunks is not None:
            old_chunks = subjects.media_chunks(before.head.chunks)
            await self._bus.purge(subjects.MEDIA_STREAM, old_chunks)
        if filename is not None:
            await _mark_uploaded(self._bus, name, self._tenant)
        return StoredFile(name, head, self._bus.now_ms())

    async def abort(self) -> None:
        """Remove the stored chunks, unless a head may refer to them. Raises Unavailable."""
        self._waiting.clear()
        if self._num_chunks and not self._may_be_named:
            await self._bus.purge(subjects.MEDIA_STREAM, subjects.media_chunks(self._chunks))

    async def _publish(self, chunk: bytes) -> None:
        subject = subjects.media_chunk(self._chunks, self._num_chunks)
        self._num_chunks += 1
        await self._bus.publish_without_id(subject, chunk, tenant_header(self._tenant))


async def _find_head(bus: Bus, stored_name: str) -> tuple[MediaHead, float] | None:
    """Return the head and its storage time, in Unix milliseconds of the broker's clock."""
    stored = await bus.read_last(subjects.MEDIA_STREAM, subjects.media(stored_name))
    head = None if stored is None else decode_media_head(stored.data)
    return None if stored is None or head is None else (head, stored.stored_ms)
