"""Input files of batches: moved from the stream of media, and read from any position."""

import asyncio
import hashlib
import secrets

import pytest

from shared.batches.input_file import LineCutter
from shared.bus.bus import Bus
from shared.errors import NotFound
from shared.protocol import subjects
from shared.state import batch_files, media_store
from shared.state.batch_files import MediaLender
from shared.state.media_store import CHUNK_BYTES, MediaUpload, StoredFile


async def upload(bus: Bus, data: bytes, tenant: str = "t", life_s: float = 3600) -> StoredFile:
    sending = MediaUpload(bus, tenant)
    await sending.write(data)
    name, head = await sending.seal("a.jsonl", "batch")
    expires_s = int(bus.now_ms() / 1000 + life_s)
    return await batch_files.adopt(bus, name, head, expires_s, tenant)


async def read(bus: Bus, file: StoredFile, offset: int = 0) -> bytes:
    pieces = [(data, is_last) async for data, is_last in batch_files.read(bus, file, "t", offset)]
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    return b"".join(data for data, _ in pieces)


async def sizes(bus: Bus) -> tuple[int, int]:
    media, _ = await bus.figures.size(subjects.MEDIA_STREAM)
    batches, _ = await bus.figures.size(subjects.BATCHES_STREAM)
    return media, batches


async def test_a_file_is_moved_and_read_from_any_position(bus: Bus) -> None:
    data = secrets.token_bytes(2 * CHUNK_BYTES + 100)
    before = await sizes(bus)
    file = await upload(bus, data)
    assert file.name == hashlib.sha256(data).hexdigest()
    assert await sizes(bus) == (before[0], before[1] + 4)
    found = await batch_files.look_up(bus, file.name, "t")
    assert found is not None
    assert found.head == file.head
    for offset in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 99, len(data)):
        assert await read(bus, found, offset) == data[offset:]
    # An equal file replaces the stored one.
    await upload(bus, data)
    assert await sizes(bus) == (before[0], before[1] + 4)
    assert await read(bus, found) == data
    assert await batch_files.look_up(bus, file.name, "other") is None
    await batch_files.remove(bus, file.name, "t")
    assert await sizes(bus) == before
    with pytest.raises(NotFound):
        await read(bus, found)


async def test_an_equal_file_is_stored_for_the_longer_time(bus: Bus) -> None:
    data = secrets.token_bytes(100)
    first = await upload(bus, data, life_s=7200)
    again = await upload(bus, data, life_s=3600)
    assert again.head.expires_s == first.head.expires_s
    stored = await batch_files.look_up(bus, first.name, "t")
    assert stored is not None
    assert stored.head.expires_s == first.head.expires_s
    longer = await upload(bus, data, life_s=9000)
    assert (longer.head.expires_s or 0) > (first.head.expires_s or 0)


async def test_a_file_that_many_lines_name_is_lent_once(bus: Bus) -> None:
    file = await upload(bus, secrets.token_bytes(100))
    lender = MediaLender(bus, max_bytes=100)
    before = (await bus.figures.sequence_range(subjects.MEDIA_STREAM))[1]
    await asyncio.gather(*(lender.lend(f"media:{file.name}".encode(), "t") for _ in range(20)))
    # One chunk and one head.
    assert (await bus.figures.sequence_range(subjects.MEDIA_STREAM))[1] == before + 2
    assert await media_store.look_up(bus, file.name, "other") is None


async def test_a_file_that_cannot_be_media_is_not_lent(bus: Bus) -> None:
    file = await upload(bus, secrets.token_bytes(101))
    await MediaLender(bus, max_bytes=100).lend(f"media:{file.name}".encode(), "t")
    assert await media_store.look_up(bus, file.name, "t") is None


async def test_an_empty_file_has_no_lines(bus: Bus) -> None:
    file = await upload(bus, b"")
    assert await read(bus, file) == b""
    lines = [line async for line in batch_files.read_lines(bus, file, "t", LineCutter(10))]
    assert lines == []


async def test_lines_are_read_from_the_position_of_a_cutter(bus: Bus) -> None:
    contents = [b"%d" % n * (n % 50) for n in range(20_000)]
    file = await upload(bus, b"\n".join(contents))
    lines = [line async for line in batch_files.read_lines(bus, file, "t", LineCutter(1000))]
    assert [line.content for line in lines] == contents
    start = lines[12_345]
    cutter = LineCutter(1000, start.number, start.offset)
    assert [line async for line in batch_files.read_lines(bus, file, "t", cutter)] == lines[12_345:]


async def test_a_file_expires(bus: Bus) -> None:
    file = await upload(bus, b"x", life_s=1)
    while await batch_files.look_up(bus, file.name, "t") is not None:
        pass
