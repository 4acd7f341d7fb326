"""The stream of images, each named by the SHA-256 of its bytes.

An image is stored as chunks, followed by a head. Readers verify the hash, so that no other bytes
can be served under a name. An incomplete image counts as missing.

A tenant finds only images that were stored for that tenant: knowing the hash of a file does not
give access to it, and must not reveal whether another tenant has sent it.
"""

import asyncio
import hashlib
import re

from shared.bus.bus import Bus
from shared.bus.streams import MEDIA_REUSE_S
from shared.errors import MediaTooLarge
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import MediaHead, decode_media_head

CHUNK_BYTES = 512 * 2**10
MAX_CHUNKS_IN_FLIGHT = 8
# A replica that serves reads may store an image a little later than its leader.
STALE_READ_S = 0.3

_URL = re.compile(r"media:([0-9a-f]{64})")


def media_url(name: str) -> str:
    return f"media:{name}"


def parse_media_url(url: str) -> str | None:
    """Return the name in a `media:` URL; None for any other text."""
    match = _URL.fullmatch(url)
    return match and match.group(1)


async def hash_media(data: bytes) -> str:
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())


def storage_name(name: str, tenant: str) -> str:
    """Return the name under which the stream stores a tenant's image."""
    return hashlib.sha256(f"{tenant}:{name}".encode()).hexdigest() if tenant else name


async def store(bus: Bus, name: str, data: bytes, tenant: str = "") -> None:
    """Store `data` for longer than any request that begins now may take.

    An image that was stored recently is not written again. Raises Unavailable.
    """
    stored_name = storage_name(name, tenant)
    found = await _find_head(bus, stored_name)
    if found is not None:
        head, stored_ms = found
        is_recent = bus.now_ms() - stored_ms < 1000 * MEDIA_REUSE_S
        if is_recent and head.num_bytes == len(data):
            return
    starts = range(0, len(data), CHUNK_BYTES)
    credit = asyncio.Semaphore(MAX_CHUNKS_IN_FLIGHT)

    async def publish(number: int, start: int) -> None:
        async with credit:
            chunk = data[start : start + CHUNK_BYTES]
            await bus.publish_without_id(subjects.media_chunk(stored_name, number), chunk)

    await asyncio.gather(*(publish(number, start) for number, start in enumerate(starts)))
    head = MediaHead(len(data), len(starts))
    await bus.publish_without_id(subjects.media(stored_name), to_json(head))


async def find(bus: Bus, name: str, max_bytes: int, tenant: str = "") -> bytes | None:
    """Return the bytes of this name; None if they are missing or incomplete.

    Raises MediaTooLarge before more than `max_bytes` are read, or Unavailable.
    """
    data = await _read(bus, name, max_bytes, tenant)
    if data is None:
        await asyncio.sleep(STALE_READ_S)
        data = await _read(bus, name, max_bytes, tenant)
    return data


async def _read(bus: Bus, name: str, max_bytes: int, tenant: str) -> bytes | None:
    stored_name = storage_name(name, tenant)
    found = await _find_head(bus, stored_name)
    if found is None:
        return None
    head, _ = found
    if head.num_bytes > max_bytes:
        raise MediaTooLarge(
            f"an image of {head.num_bytes} bytes is over the limit of {max_bytes} bytes"
        )
    data = bytearray()
    for first in range(0, head.num_chunks, MAX_CHUNKS_IN_FLIGHT):
        numbers = range(first, min(first + MAX_CHUNKS_IN_FLIGHT, head.num_chunks))
        reads = (
            bus.read_last(subjects.MEDIA_STREAM, subjects.media_chunk(stored_name, n))
            for n in numbers
        )
        for chunk in await asyncio.gather(*reads):
            if chunk is None or len(data) + len(chunk.data) > head.num_bytes:
                return None
            data += chunk.data
    content = bytes(data)
    return content if await hash_media(content) == name else None


async def _find_head(bus: Bus, stored_name: str) -> tuple[MediaHead, float] | None:
    """Return the head and its storage time, in Unix milliseconds of the broker's clock."""
    stored = await bus.read_last(subjects.MEDIA_STREAM, subjects.media(stored_name))
    head = None if stored is None else decode_media_head(stored.data)
    return None if stored is None or head is None else (head, stored.stored_ms)
