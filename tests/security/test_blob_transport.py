"""Attacks on the TCP transport of blobs, by strangers who can connect."""

import asyncio
import contextlib
import os
import secrets
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from shared.blobs import protocol, server
from shared.blobs.buffer_pool import BufferPool
from shared.blobs.server import MAX_STRANGERS, BlobServer
from shared.blobs.transports import TcpTransport
from shared.net.listening import bind
from shared.protocol.multimodal import BlobRef
from tests.support.waiting import until

NAME = "ab" * 32
CONTENT = b"payload" * 1000
LONG_S = 600.0
ANSWER_LEN = 1 + 8 + 8 + 32 + len(CONTENT)


@dataclass
class Owner:
    """A worker that serves blobs over TCP."""

    blobs: BlobServer
    address: tuple[str, int]

    def put(self) -> BlobRef:
        ref = self.blobs.put(NAME, [CONTENT], LONG_S)
        assert ref is not None
        return ref

    async def stranger(self, data: bytes = b"") -> asyncio.StreamReader:
        """Connect, send `data`, and return what the owner sends."""
        reader, writer = await asyncio.open_connection(*self.address)
        self.writers.append(writer)
        writer.write(data)
        await writer.drain()
        return reader

    def __post_init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    blobs = BlobServer("owner", 2**20)
    blobs.listen(bind("blobs", "127.0.0.1", 0), "127.0.0.1")
    assert blobs.address.tcp is not None
    transport = Owner(blobs, blobs.address.tcp)
    yield transport
    for writer in transport.writers:
        writer.close()
    await blobs.close()


def get(ref: BlobRef) -> bytes:
    return struct.pack("<c32sf", protocol.GET, ref.key, 0.0)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def read(owner: Owner, ref: BlobRef) -> bytes:
    transport = TcpTransport(owner.address, BufferPool(2**20))
    try:
        with await transport.get(ref) as blob:
            return bytes(blob.data)
    finally:
        transport.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the owner closes the connection, however long it takes."""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    return True


async def test_a_thousand_silent_connections_take_few_files_and_keep_no_reader_out(
    owner: Owner,
) -> None:
    ref, before = owner.put(), num_files()
    strangers = [await owner.stranger() for _ in range(1000)]
    ours = len(owner.writers)
    assert await read(owner, ref) == CONTENT
    held = num_files() - before - ours
    assert held <= MAX_STRANGERS + 8, held
    # The oldest have been disconnected.
    assert await is_closed(strangers[0])


ATTACKS = {
    "silence": b"",
    "part of a request": b"G" + bytes(20),
    "a forged key": struct.pack("<c32sf", b"G", secrets.token_bytes(32), 0.0),
    "a name": struct.pack("<c32sf", b"G", bytes.fromhex(NAME), 0.0),
    "another forged key": struct.pack("<c32sf", b"A", secrets.token_bytes(32), 0.0),
    "many forged keys": struct.pack("<c32sf", b"R", secrets.token_bytes(32), 0.0) * 100,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_who_shows_no_valid_key_is_disconnected(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, attack: bytes
) -> None:
    monkeypatch.setattr(server, "KEY_TIMEOUT_S", 0.5)
    owner.put()
    reader = await owner.stranger(attack)
    got = b""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            got = await reader.read()
    assert CONTENT not in got


async def test_a_dribbled_request_gets_no_more_time(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEY_TIMEOUT_S", 0.5)
    reader = await owner.stranger()
    closing = asyncio.create_task(is_closed(reader))
    writer = owner.writers[-1]
    async with asyncio.timeout(60):
        while not closing.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"G" + bytes(35))
                await writer.drain()
            await asyncio.sleep(0.02)


async def test_a_reader_with_a_key_has_more_time(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEY_TIMEOUT_S", 3.0)
    reader = await owner.stranger(request := get(owner.put()))
    await reader.readexactly(len(protocol.HELLO) + ANSWER_LEN)
    await asyncio.sleep(3.5)
    owner.writers[0].write(request)
    async with asyncio.timeout(60):
        assert (await reader.readexactly(ANSWER_LEN)).endswith(CONTENT)


async def test_an_idle_reader_is_disconnected(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 0.5)
    reader = await owner.stranger(get(owner.put()))
    async with asyncio.timeout(60):
        assert (await reader.read()).endswith(CONTENT)


async def test_a_reader_is_not_disconnected_for_strangers(owner: Owner) -> None:
    reader = await owner.stranger(request := get(owner.put()))
    await reader.readexactly(len(protocol.HELLO) + ANSWER_LEN)
    for _ in range(3 * MAX_STRANGERS):
        await owner.stranger()
    owner.writers[0].write(request)
    async with asyncio.timeout(60):
        assert (await reader.readexactly(ANSWER_LEN)).endswith(CONTENT)


async def test_readers_have_a_limit(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_READERS", 3)
    ref = owner.put()
    request = get(ref)
    readers = [await owner.stranger(request) for _ in range(3)]
    for reader in readers:
        await reader.readuntil(b"payload")
    assert (await (await owner.stranger(request)).read()) in (b"", protocol.HELLO)
    # A reader that ends makes room.
    owner.writers[0].close()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ConnectionError, OSError):
                assert await read(owner, ref) == CONTENT
                break
            await asyncio.sleep(0.01)


async def test_a_reader_whose_connection_was_closed_makes_another(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 0.2)
    ref = owner.put()
    transport = TcpTransport(owner.address, BufferPool(2**20))
    (await transport.get(ref)).close()
    await until(lambda: transport.is_closed_by_owner)
    with contextlib.suppress(ConnectionError):
        (await transport.get(ref)).close()
    with await transport.get(ref) as blob:
        assert bytes(blob.data) == CONTENT
    transport.close()
