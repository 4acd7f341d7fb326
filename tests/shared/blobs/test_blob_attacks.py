"""Forged references, malicious owners and leftovers of killed processes: rows S54 to S56."""

import asyncio
import gc
import math
import os
import secrets
import socket
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shared.blobs import mm_items, protocol
from shared.blobs.arena import Arena
from shared.blobs.server import host_id
from shared.blobs.store import Blobs
from shared.blobs.transports import CHUNK_BYTES, SharedMemoryTransport
from shared.bus.bus import Bus
from shared.codec.arrays import from_numpy
from shared.codec.tensors import to_torch
from shared.config.schema import BlobsConfig
from shared.errors import BlobLost
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import BlobAddress, Heartbeat
from shared.protocol.multimodal import BlobRef
from tests.shared.blobs.test_store import NAME, TRANSPORTS, put
from tests.shared.conftest import Advertise, StartBlobs

ROOT = Path(__file__).parents[3]
MIB = 2**20
KILLS = 100


def memory_files() -> int:
    """Return this process's file descriptors of arenas."""
    return sum("memfd:" in link for link in _links())


def sockets() -> int:
    return sum(link.startswith("socket:") for link in _links())


def _links() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return links


def mappings(access: str) -> list[tuple[int, int]]:
    """Return [start, end) of every mapped arena with this access."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, granted, *_ = line.split()
        if "memfd:pagemill" in line and granted.startswith(access):
            start, end = (int(text, 16) for text in addresses.split("-"))
            ranges.append((start, end))
    return ranges


# -- S54: references ------------------------------------------------------------------------------


@pytest.mark.parametrize("advertise", TRANSPORTS.values(), ids=TRANSPORTS)
async def test_forged_references_are_refused(start: StartBlobs, advertise: Advertise) -> None:
    owner, reader = await start(advertise=advertise), await start()
    ours = put(owner, b"a" * 5000)
    forged = [
        replace(ours, key=bytes([ours.key[0] ^ 1]) + ours.key[1:]),
        replace(ours, key=bytes(32)),
        replace(ours, key=bytes.fromhex(NAME)),  # a name grants no access
        replace(ours, key=secrets.token_bytes(32)),
        replace(ours, num_bytes=5001),
        replace(ours, num_bytes=2**30),
        replace(ours, num_bytes=2**62),
    ]
    for ref in forged:
        with pytest.raises(BlobLost) as caught:
            await reader.get(ref)
        for inside in (owner.address.local, ours.key.hex(), "/proc", "memfd"):
            assert inside not in caught.value.message
    with await reader.get(ours) as blob:
        assert bytes(blob.data) == b"a" * 5000


@pytest.mark.parametrize("worker", ["", "*", ">", "a.b", "a b", "a\r\nPUB x 0\r\n", "é", "a" * 200])
async def test_invalid_worker_names_are_not_contacted(start: StartBlobs, worker: str) -> None:
    reader = await start()
    ref = BlobRef(worker, bytes(32), 5)
    with pytest.raises(BlobLost):
        await reader.get(ref)
    await reader.release(ref)


async def test_names_cannot_be_looked_up_over_the_network(start: StartBlobs) -> None:
    owner = await start()
    put(owner, b"abc")
    assert owner.address.tcp is not None
    stream, writer = await asyncio.open_connection(*owner.address.tcp)
    assert await stream.readexactly(len(protocol.HELLO)) == protocol.HELLO
    writer.write(struct.pack("<c32sf", protocol.FIND, bytes.fromhex(NAME), 60.0))
    assert await stream.read() == b""
    writer.close()


@pytest.mark.parametrize("ttl_s", [math.nan, math.inf, -math.inf, -1.0])
async def test_invalid_ttls_give_no_key(start: StartBlobs, ttl_s: float) -> None:
    owner = await start(BlobsConfig(arena_mib=1))
    await owner.release(put(owner, b"a" * MIB))
    road = SharedMemoryTransport(owner.address.local)
    with pytest.raises(OSError, match="closed"):
        await road.find(NAME, ttl_s)
    road.close()
    assert owner.put("cd" * 32, [b"b" * MIB], 60) is not None, "it is not pinned"


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(5, 1), (0, CHUNK_BYTES + 1), (0, 2**64 - 1), (2**64 - 1, 1), (2**63, 2**63), (0, 0)],
)
async def test_chunks_outside_of_a_blob_are_refused(
    bus: Bus, start: StartBlobs, offset: int, num_bytes: int
) -> None:
    owner = await start()
    ref = put(owner, b"abcde")
    question = protocol.pack_chunk(protocol.BlobChunk(protocol.GET, ref.key, offset, num_bytes))
    assert await bus.request(subjects.blob(ref.worker), question, 1) == b""


# -- S54, S55: owners that lie --------------------------------------------------------------------


Lie = Callable[[int, protocol.BlobReply], Awaitable[tuple[Blobs, BlobRef]]]


@pytest.fixture
async def lie(start: StartBlobs) -> AsyncIterator[Lie]:
    """Replace an owner by a process that passes `fd` and replies with `answer`."""
    listeners: list[socket.socket] = []
    tasks: list[asyncio.Task[None]] = []

    async def serve(listener: socket.socket, fd: int, answer: protocol.BlobReply) -> None:
        loop = asyncio.get_running_loop()
        sock, _ = await loop.sock_accept(listener)
        with sock:
            socket.send_fds(sock, [protocol.HELLO], [fd])
            await protocol.read_request(sock)
            await protocol.send_reply(sock, answer)
            await asyncio.sleep(60)

    async def lie(fd: int, answer: protocol.BlobReply) -> tuple[Blobs, BlobRef]:
        name = f"pagemill-test-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen()
        listener.setblocking(False)
        listeners.append(listener)
        tasks.append(asyncio.create_task(serve(listener, fd, answer)))

        def advertise(address: BlobAddress) -> BlobAddress:
            return replace(address, local=name, tcp=None)

        owner = await start(advertise=advertise)
        return owner, BlobRef(put(owner, b"").worker, bytes(32), 100)

    yield lie
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("offset", [MIB - 99, MIB, 2**63, 2**64 - 1])
async def test_offsets_outside_of_the_arena_are_refused(
    start: StartBlobs, lie: Lie, offset: int
) -> None:
    arena, reader = Arena(MIB), await start()
    _, ref = await lie(arena.fd, protocol.BlobReply(True, offset, 100))
    with pytest.raises(BlobLost):
        await reader.get(ref)


async def test_memory_that_may_shrink_is_not_mapped(start: StartBlobs, lie: Lie) -> None:
    fd = os.memfd_create("pagemill", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    reader = await start()
    _, ref = await lie(fd, protocol.BlobReply(True, 0, 100))
    with pytest.raises(BlobLost):
        await reader.get(ref)
    os.close(fd)


async def test_another_users_memory_is_not_mapped(
    start: StartBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await start()
    ref = put(owner, b"abc")
    road = SharedMemoryTransport(owner.address.local)
    monkeypatch.setattr(protocol, "is_same_user", lambda _: False)
    with pytest.raises(ValueError, match="another user"):
        await road.get(ref)
    monkeypatch.undo()
    blob = await road.get(ref)
    assert bytes(blob.data) == b"abc"
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    pair = socket.socketpair()
    assert [protocol.is_same_user(sock) for sock in pair] == [False, False]
    for sock in pair:
        sock.close()
    blob.close()
    road.close()


async def test_an_arena_in_use_cannot_be_truncated(start: StartBlobs) -> None:
    owner, reader = await start(), await start()
    ref = put(owner, b"a" * MIB)
    blob = await reader.get(ref)
    fd = owner._server.arena.fd
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for file in (fd, again):
        with pytest.raises(PermissionError):
            os.ftruncate(file, 0)
        with pytest.raises(PermissionError):
            os.pwrite(file, b"x", 0)
    os.close(again)
    assert bytes(blob.data) == b"a" * MIB
    blob.close()


# -- S56: what killed processes leave -------------------------------------------------------------

READERS = """
import asyncio, os, signal, sys
from shared.protocol.multimodal import BlobRef
from shared.blobs.transports import SharedMemoryTransport

async def read(sender):
    ref = BlobRef("", bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
    blob = await SharedMemoryTransport(sys.argv[1]).get(ref)
    os.write(sender, bytes(blob.data[:1]))
    await asyncio.sleep(60)

for _ in range(int(sys.argv[4])):
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        asyncio.run(read(sender))
    os.close(sender)
    assert os.read(receiver, 1) == b"a"
    os.close(receiver)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def run(script: str, *args: object) -> "asyncio.Future[subprocess.CompletedProcess[bytes]]":
    command = [sys.executable, "-c", script, *map(str, args)]
    return asyncio.get_running_loop().run_in_executor(
        None, lambda: subprocess.run(command, cwd=ROOT, check=True, timeout=100)
    )


async def test_a_hundred_killed_readers_leave_nothing(start: StartBlobs) -> None:
    owner = await start(BlobsConfig(arena_mib=1))
    ref = put(owner, b"a" * MIB)
    gc.collect()  # Garbage of earlier tests is not counted.
    names, before = set(os.listdir("/dev/shm")), (memory_files(), sockets())
    await run(READERS, owner.address.local, ref.key.hex(), ref.num_bytes, KILLS)
    await owner.release(ref)
    for _ in range(200):
        if owner.put("cd" * 32, [b"b" * MIB], 60) is not None:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("a dead reader has left a pin")
    assert (memory_files(), sockets()) == before
    assert set(os.listdir("/dev/shm")) == names


OWNERS = """
import asyncio, os, sys
from shared.blobs.server import BlobServer

async def own(sender):
    server = BlobServer("owner", 2**20)
    server.start()
    ref = server.put("ab" * 32, [b"a" * 2**20], 60)
    os.write(sender, f"{os.getpid()} {server.address.local} {ref.key.hex()}\\n".encode())
    await asyncio.sleep(60)

for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        asyncio.run(own(1))
    os.waitpid(pid, 0)
"""


async def test_a_hundred_killed_owners_leave_nothing_and_take_nothing(
    start: StartBlobs, bus: Bus
) -> None:
    gc.collect()  # Garbage of earlier tests is not counted.
    names, before = set(os.listdir("/dev/shm")), (memory_files(), sockets(), len(mappings("r--")))
    reader = await start()
    owners = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNERS, str(KILLS), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert owners.stdout is not None
    for _ in range(KILLS):
        pid, name, key = (await owners.stdout.readline()).decode().split()
        address = BlobAddress(host_id(), name)
        await bus.heartbeats.publish(
            name, to_json(Heartbeat("test", name, "0", 0, [], {}, address))
        )
        with await reader.get(BlobRef(name, bytes.fromhex(key), MIB)) as blob:
            os.kill(int(pid), 9)
            assert bytes(blob.data) == b"a" * MIB
        # Only the present owner's memory is mapped, and no dead owner's.
        assert len(mappings("r--")) <= before[2] + 1
    assert await owners.wait() == 0
    await reader.close()
    del blob
    await asyncio.sleep(0)
    assert (memory_files(), sockets(), len(mappings("r--"))) == before
    assert set(os.listdir("/dev/shm")) == names


# -- what is copied on the way --------------------------------------------------------------------


async def test_one_copy_by_the_writer_and_none_by_the_reader(start: StartBlobs) -> None:
    owner, reader = await start(), await start()
    pixels = np.arange(16 * MIB, dtype=np.uint8)
    fields = {"pixel_patches": from_numpy(pixels), "image_grid_thw": from_numpy(np.arange(3))}
    tracemalloc.start()
    ref = mm_items.put_item(owner, NAME, 7, fields, 60)
    assert ref is not None
    # The only copy is in the arena; peak memory would show another one.
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.reset_peak()
    blob = await reader.get(ref)
    read, num_tokens = mm_items.read_item(blob)
    restored = to_torch(read["pixel_patches"])
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()
    assert num_tokens == 7
    address, num_bytes = restored.data_ptr(), restored.numel()
    assert any(start <= address and address + num_bytes <= end for start, end in mappings("r--"))
    assert not any(start <= address < end for start, end in mappings("rw"))
    assert np.array_equal(restored.numpy(), pixels)
    del restored, read
    blob.close()
