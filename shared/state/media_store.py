"""Pictures in a stream of their own, named by the SHA-256 of their bytes.

A picture is its chunks, and a head that is written after them. Whoever reads it computes the hash
again, so nobody can put other bytes under a name; what is not whole is not there.

A tenant finds only what was stored for that tenant: to know the hash of a file is not to have it,
and nobody is to learn from it whether others have sent the file.
"""

import asyncio
import hashlib
import re

import msgspec

from shared.bus.bus import Bus
from shared.bus.streams import MEDIA_REUSE_S
from shared.errors import MediaTooLarge
from shared.protocol import subjects
from shared.protocol.messages import MediaHead, to_json

CHUNK_BYTES = 512 * 2**10
CHUNKS_UNDER_WAY = 8
# A replica that answers reads may know of a picture a little later than its leader.
STALE_READ_S = 0.3

_URL = re.compile(r"media:([0-9a-f]{64})")
_head = msgspec.json.Decoder(MediaHead)


def media_url(name: str) -> str:
    return f"media:{name}"


def parse_media_url(url: str) -> str | None:
    """The name in a `media:` URL; None for any other text."""
    match = _URL.fullmatch(url)
    return match and match.group(1)


async def hash_media(data: bytes) -> str:
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())


def storage_name(name: str, tenant: str) -> str:
    """By which name a tenant's picture is in the stream."""
    return hashlib.sha256(f"{tenant}:{name}".encode()).hexdigest() if tenant else name


async def store(bus: Bus, name: str, data: bytes, tenant: str = "") -> None:
    """Have `data` in the stream for longer than any request that begins now may take.

    What is there already, and not for long, is not written again. Raises Unavailable.
    """
    place = storage_name(name, tenant)
    known = await _find_head(bus, place)
    if known is not None:
        head, stored_ms = known
        young = bus.now_ms() - stored_ms < 1000 * MEDIA_REUSE_S
        if young and head.num_bytes == len(data):
            return
    starts = range(0, len(data), CHUNK_BYTES)
    credit = asyncio.Semaphore(CHUNKS_UNDER_WAY)

    async def publish(number: int, start: int) -> None:
        async with credit:
            chunk = data[start : start + CHUNK_BYTES]
            await bus.publish_without_id(subjects.media_chunk(place, number), chunk)

    await asyncio.gather(*(publish(number, start) for number, start in enumerate(starts)))
    head = MediaHead(len(data), len(starts))
    await bus.publish_without_id(subjects.media(place), to_json(head))


async def find(bus: Bus, name: str, max_bytes: int, tenant: str = "") -> bytes | None:
    """The bytes of this name; None if they are not there, or not whole.

    Raises MediaTooLarge before more than `max_bytes` are read, or Unavailable.
    """
    data = await _read(bus, name, max_bytes, tenant)
    if data is None:
        await asyncio.sleep(STALE_READ_S)
        data = await _read(bus, name, max_bytes, tenant)
    return data


async def _read(bus: Bus, name: str, max_bytes: int, tenant: str) -> bytes | None:
    place = storage_name(name, tenant)
    known = await _find_head(bus, place)
    if known is None:
        return None
    head, _ = known
    if head.num_bytes > max_bytes:
        raise MediaTooLarge(
            f"a picture of {head.num_bytes} bytes is over the limit of {max_bytes} bytes"
        )
    data = bytearray()
    for first in range(0, head.num_chunks, CHUNKS_UNDER_WAY):
        numbers = range(first, min(first + CHUNKS_UNDER_WAY, head.num_chunks))
        reads = (
            bus.read_last(subjects.MEDIA_STREAM, subjects.media_chunk(place, n)) for n in numbers
        )
        for chunk in await asyncio.gather(*reads):
            if chunk is None or len(data) + len(chunk.data) > head.num_bytes:
                return None
            data += chunk.data
    found = bytes(data)
    return found if await hash_media(found) == name else None


async def _find_head(bus: Bus, place: str) -> tuple[MediaHead, float] | None:
    """With the time when it was stored, in milliseconds of the broker's clock."""
    stored = await bus.read_last(subjects.MEDIA_STREAM, subjects.media(place))
    if stored is None:
        return None
    try:
        return _head.decode(stored.data), stored.stored_ms
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
