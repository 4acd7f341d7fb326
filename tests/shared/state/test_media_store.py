"""Images in the broker: stored once, complete, and only under their own hash."""

import hashlib
import secrets

import pytest

from shared import client
from shared.bus.bus import Bus
from shared.errors import MediaTooLarge
from shared.protocol import subjects
from shared.state import media_store
from shared.state.media_store import CHUNK_BYTES

LIMIT = 8 * CHUNK_BYTES


async def stored(bus: Bus, num_bytes: int) -> tuple[str, bytes]:
    data = secrets.token_bytes(num_bytes)
    url = await client.pin_media(bus, data)
    name = media_store.parse_media_url(url)
    assert name == hashlib.sha256(data).hexdigest()
    return name, data


async def newest(bus: Bus) -> int:
    """Return the last sequence of the stream."""
    return (await bus.figures.sequence_range(subjects.MEDIA_STREAM))[1]


@pytest.mark.parametrize(
    "num_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, LIMIT - 1, LIMIT], ids=str
)
async def test_a_stored_image_is_found(bus: Bus, num_bytes: int) -> None:
    name, data = await stored(bus, num_bytes)
    assert await media_store.find(bus, name, LIMIT) == data


async def test_a_recent_image_is_not_written_again(bus: Bus) -> None:
    name, data = await stored(bus, 3 * CHUNK_BYTES)
    before = await newest(bus)
    await media_store.store(bus, name, data)
    assert await newest(bus) == before


async def test_a_file_replaces_the_one_in_its_place(bus: Bus) -> None:
    files = [secrets.token_bytes(2 * CHUNK_BYTES) for _ in range(3)]
    names = [await media_store.hash_media(data) for data in files]
    for name, data, place in zip(names, files, ("p 0", "p 1", "p 0"), strict=True):
        await media_store.store(bus, name, data, "t", place)
    found = [await media_store.find(bus, name, LIMIT, "t") for name in names]
    assert found == [None, *files[1:]]
    # The first file may be computed again.
    await media_store.store(bus, names[0], files[0], "t", "p 0")
    assert await media_store.find(bus, names[0], LIMIT, "t") == files[0]


async def test_an_image_that_expires_too_soon_is_replaced(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data = await stored(bus, 2 * CHUNK_BYTES)
    (old,) = await bus.read(subjects.MEDIA_STREAM, subjects.media(name))
    monkeypatch.setattr(media_store, "MEDIA_REUSE_S", 0.0)
    await media_store.store(bus, name, data)
    (new,) = await bus.read(subjects.MEDIA_STREAM, subjects.media(name))
    assert new.sequence == old.sequence + 3
    assert await media_store.find(bus, name, LIMIT) == data


async def test_an_incomplete_image_is_missing(bus: Bus) -> None:
    data = secrets.token_bytes(2 * CHUNK_BYTES)
    name = await media_store.hash_media(data)
    await bus.publish_without_id(subjects.media_chunk(name, 0), data[:CHUNK_BYTES])
    assert await media_store.find(bus, name, LIMIT) is None
    await media_store.store(bus, name, data)
    assert await media_store.find(bus, name, LIMIT) == data


@pytest.mark.parametrize("chunk", [b"", b"x" * CHUNK_BYTES, b"x" * (CHUNK_BYTES + 1)])
async def test_a_damaged_image_is_missing(bus: Bus, chunk: bytes) -> None:
    name, _ = await stored(bus, 3 * CHUNK_BYTES)
    await bus.publish_without_id(subjects.media_chunk(name, 1), chunk)
    assert await media_store.find(bus, name, LIMIT) is None


async def test_an_image_with_a_lost_chunk_is_missing(bus: Bus) -> None:
    name, _ = await stored(bus, 3 * CHUNK_BYTES)
    await bus.purge(subjects.MEDIA_STREAM, subjects.media_chunk(name, 1))
    assert await media_store.find(bus, name, LIMIT) is None


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"num_bytes":-1,"num_chunks":1}',
        b'{"num_bytes":1,"num_chunks":1000000000}',
        b'{"num_bytes":1,"num_chunks":0}',
        b'{"num_bytes":5,"num_chunks":1}',
    ],
)
async def test_a_false_head_is_a_miss_and_is_replaced(bus: Bus, head: bytes) -> None:
    name, data = await stored(bus, 10)
    await bus.publish_without_id(subjects.media(name), head)
    assert await media_store.find(bus, name, LIMIT) is None
    if b'"num_bytes":10' not in head:
        await media_store.store(bus, name, data)
        assert await media_store.find(bus, name, LIMIT) == data


async def test_other_bytes_under_a_name_are_not_served(bus: Bus) -> None:
    name = hashlib.sha256(b"what is meant").hexdigest()
    await media_store.store(bus, name, b"what is given")
    assert await media_store.find(bus, name, LIMIT) is None


async def test_too_large_images_are_not_read(bus: Bus) -> None:
    name, _ = await stored(bus, 1000)
    with pytest.raises(MediaTooLarge, match="1000 bytes"):
        await media_store.find(bus, name, 999)


@pytest.mark.parametrize("url", ["media:", "media:" + "A" * 64, "media:" + "a" * 65, "a" * 64])
def test_other_urls_have_no_name(url: str) -> None:
    assert media_store.parse_media_url(url) is None
