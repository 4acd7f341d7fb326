"""Every transport reads the same bytes and reports missing blobs."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.blobs import protocol
from shared.blobs.buffer_pool import BufferPool
from shared.blobs.store import Blobs
from shared.blobs.transports import TcpTransport
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import BlobsConfig
from shared.errors import BlobLost
from shared.protocol import subjects
from shared.protocol.messages import BlobAddress
from shared.protocol.multimodal import BlobRef
from tests.shared.conftest import Advertise, StartBlobs

MIB = 2**20
NAME = "ab" * 32


def put(blobs: Blobs, data: bytes, name: str = NAME, ttl_s: float = 60) -> BlobRef:
    ref = blobs.put(name, [data], ttl_s)
    assert ref is not None
    return ref


# Names of all addresses of a machine; the test's broker is reached from 127.0.0.1.
WILDCARDS = ["0.0.0.0", *(["::"] if Path("/proc/net/if_inet6").exists() else [])]


@pytest.mark.parametrize("listen", WILDCARDS)
async def test_an_owner_that_listens_everywhere_publishes_the_address_of_its_broker_connection(
    start: StartBlobs, listen: str
) -> None:
    owner = await start(BlobsConfig(arena_mib=64, listen=listen), elsewhere)
    assert owner.address.tcp is not None
    assert owner.address.tcp[0] == "127.0.0.1"
    with contextlib.closing(TcpTransport(owner.address.tcp, BufferPool(MIB))) as transport:
        blob = await transport.get(put(owner, b"abc"))
        assert bytes(blob.data) == b"abc"
        blob.close()
    named = await start(BlobsConfig(arena_mib=64, listen=listen, advertise="localhost"))
    assert named.address.tcp is not None
    assert named.address.tcp[0] == "localhost"


async def until_there_is_room(owner: Blobs, data: bytes) -> None:
    for _ in range(200):
        if owner.put("cd" * 32, [data], 60) is not None:
            return
        await asyncio.sleep(0.01)
    pytest.fail("there is no room")


def run(script: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *args], stdout=subprocess.PIPE)


def elsewhere(address: BlobAddress) -> BlobAddress:
    return msgspec.structs.replace(address, host="another machine")


def no_tcp(address: BlobAddress) -> BlobAddress:
    return msgspec.structs.replace(elsewhere(address), tcp=None)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def dead_ends(address: BlobAddress) -> BlobAddress:
    """Return an address at which both faster transports fail."""
    return msgspec.structs.replace(address, local="nobody", tcp=("127.0.0.1", closed_port()))


TRANSPORTS: dict[str, Advertise] = {
    "its memory": lambda address: address,
    "a socket": elsewhere,
    "the broker": no_tcp,
    "the broker, when the others fail": dead_ends,
}


@pytest.mark.parametrize("advertise", TRANSPORTS.values(), ids=TRANSPORTS)
@pytest.mark.parametrize("num_bytes", [0, 1, 64 * 1024, 3 * MIB + 5])
async def test_every_transport_reads_the_same_bytes(
    start: StartBlobs, advertise: Advertise, num_bytes: int
) -> None:
    owner, reader = await start(advertise=advertise), await start()
    data = secrets.token_bytes(num_bytes)
    ref = put(owner, data)
    for _ in range(2):
        with await reader.get(ref) as blob:
            assert bytes(blob.data) == data
            assert blob.data.readonly


async def test_the_owner_reads_its_own_blobs(start: StartBlobs) -> None:
    owner = await start()
    with await owner.get(put(owner, b"abc")) as blob:
        assert bytes(blob.data) == b"abc"


@pytest.mark.parametrize("advertise", TRANSPORTS.values(), ids=TRANSPORTS)
async def test_released_and_expired_blobs_are_lost(start: StartBlobs, advertise: Advertise) -> None:
    owner, reader = await start(advertise=advertise), await start()
    released, expired = put(owner, b"abc"), put(owner, b"abc", ttl_s=0.05)
    await reader.release(released)
    await asyncio.sleep(0.1)
    for ref in (released, expired, BlobRef(released.worker, bytes(32), 3)):
        with pytest.raises(BlobLost):
            await reader.get(ref)
    with await reader.get(put(owner, b"abc")) as blob:
        assert bytes(blob.data) == b"abc"


async def test_a_blob_of_an_unknown_owner_is_lost_at_once(start: StartBlobs) -> None:
    reader = await start()
    async with asyncio.timeout(1):
        with pytest.raises(BlobLost):
            await reader.get(BlobRef("nobody", bytes(32), 3))


async def test_an_open_blob_does_not_change(start: StartBlobs) -> None:
    owner = await start(BlobsConfig(arena_mib=1))
    reader = await start()
    ref = put(owner, b"a" * MIB)
    blob = await reader.get(ref)
    await reader.release(ref)
    assert owner.put("cd" * 32, [b"b" * MIB], 60) is None
    assert bytes(blob.data) == b"a" * MIB
    blob.close()
    await until_there_is_room(owner, b"b" * MIB)


async def test_equal_content_is_stored_once(start: StartBlobs) -> None:
    owner, reader = await start(BlobsConfig(arena_mib=1)), await start()
    first, second = put(owner, b"a" * MIB), put(owner, b"a" * MIB)
    await reader.release(first)
    with await reader.get(second) as blob:
        assert blob.data.nbytes == MIB
    await reader.release(second)
    ref = await owner.find(NAME, 60)
    assert ref is not None, "it is kept until its room is needed"
    await reader.release(ref)
    put(owner, b"b", name="cd" * 32)
    assert await owner.find(NAME, 60) is None


async def test_many_readers_at_once(start: StartBlobs) -> None:
    owner = await start(advertise=elsewhere)
    readers = [await start() for _ in range(3)]
    contents = [secrets.token_bytes(100_000 + i) for i in range(8)]
    refs = [put(owner, data, name=f"{i:02}" * 32) for i, data in enumerate(contents)]

    async def read(reader: Blobs, index: int) -> None:
        with await reader.get(refs[index]) as blob:
            assert bytes(blob.data) == contents[index]

    await asyncio.gather(*(read(r, i) for r in readers for i in range(8) for _ in range(3)))


async def test_a_cancelled_read_does_not_affect_the_next(start: StartBlobs) -> None:
    owner, reader = await start(advertise=elsewhere), await start()
    large, small = put(owner, bytes(32 * MIB)), put(owner, b"abc", name="cd" * 32)
    for pause_s in (0.0, 0.001, 0.005, 0.02):
        reading = asyncio.create_task(reader.get(large))
        await asyncio.sleep(pause_s)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        with await reader.get(small) as blob:
            assert bytes(blob.data) == b"abc"


OWNER = """
import asyncio, sys
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.config.schema import BlobsConfig
from shared.protocol.encoding import to_json, to_msgpack
from shared.protocol.messages import Heartbeat

async def main():
    bus = await Bus.connect(sys.argv[1], "owner")
    blobs = Blobs(bus, "test", "owner", BlobsConfig(arena_mib=16))
    await blobs.start()
    beat = Heartbeat("test", "owner", "0", 0, [], {}, blobs.address)
    await bus.heartbeats.publish("owner", to_json(beat))
    print(to_msgpack(blobs.put("ab" * 32, [b"x" * 2**20], 60)).hex(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_open_blobs_survive_a_killed_owner(broker: EmbeddedServer, start: StartBlobs) -> None:
    reader = await start()
    with run(OWNER, broker.url) as owner:
        assert owner.stdout is not None
        line = await asyncio.to_thread(owner.stdout.readline)
        ref = msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=BlobRef)
        blob = await reader.get(ref)
        os.kill(owner.pid, signal.SIGKILL)
    assert bytes(blob.data) == b"x" * 2**20
    blob.close()
    async with asyncio.timeout(3):
        with pytest.raises(BlobLost):
            await reader.get(ref)


async def test_a_killed_reader_unpins_its_blobs(start: StartBlobs, broker: EmbeddedServer) -> None:
    owner = await start(BlobsConfig(arena_mib=1))
    ref = put(owner, b"a" * MIB)
    script = f"""
import asyncio, sys, msgspec
from shared.blobs.transports import SharedMemoryTransport
from shared.protocol.multimodal import BlobRef
async def main():
    transport = SharedMemoryTransport({owner.address.local!r})
    blob = await transport.get(BlobRef("", {ref.key!r}, {ref.num_bytes}))
    print(blob.data.nbytes, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with run(script) as reader:
        assert reader.stdout is not None
        assert int(await asyncio.to_thread(reader.stdout.readline)) == MIB
        await owner.release(ref)
        assert owner.put("cd" * 32, [b"b"], 60) is None
        reader.kill()
    await until_there_is_room(owner, b"b")


async def test_open_blobs_survive_a_cancelled_request(start: StartBlobs) -> None:
    """The connection is not reused, but closing it would unpin the open blob."""
    owner, reader = await start(BlobsConfig(arena_mib=1)), await start()
    ref = put(owner, b"a" * MIB)
    blob = await reader.get(ref)
    await owner.acknowledge(ref)
    asking = asyncio.create_task(reader.acknowledge(ref))
    transports: Any = reader._transports
    while not transports[ref.worker][0]._lock.locked():  # noqa: ASYNC110
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    with await reader.get(ref) as again:
        assert bytes(again.data) == b"a" * MIB
    await asyncio.sleep(0.1)
    assert owner.put("cd" * 32, [b"b" * MIB], 60) is None
    assert bytes(blob.data) == b"a" * MIB
    blob.close()
    await until_there_is_room(owner, b"b" * MIB)


async def test_invalid_requests_do_not_affect_other_readers(start: StartBlobs, bus: Bus) -> None:
    owner = await start()
    ref = put(owner, b"abc")
    assert owner.address.tcp is not None
    for nonsense in (b"", b"G", b"\xff" * 37, secrets.token_bytes(10_000)):
        stream, writer = await asyncio.open_connection(*owner.address.tcp)
        writer.write(nonsense)
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):
            await stream.read()
        writer.close()
    reader = await start()
    with await reader.get(ref) as blob:
        assert bytes(blob.data) == b"abc"
    assert await bus.request(subjects.blob(ref.worker), b"nonsense", 1) == b""


def num_mapped_arenas() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/memfd:pagemill" in line for line in maps)


async def test_the_memory_of_a_dead_owner_is_unmapped(
    broker: EmbeddedServer, start: StartBlobs
) -> None:
    reader = await start()
    num_at_first, fds_at_first = num_mapped_arenas(), len(os.listdir("/proc/self/fd"))
    with run(OWNER, broker.url) as owner:
        assert owner.stdout is not None
        line = await asyncio.to_thread(owner.stdout.readline)
        owner.stdout.close()
        ref = msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=BlobRef)
        with await reader.get(ref):
            assert num_mapped_arenas() == num_at_first + 1
        os.kill(owner.pid, signal.SIGKILL)
    for _ in range(100):
        if num_mapped_arenas() == num_at_first and len(os.listdir("/proc/self/fd")) == fds_at_first:
            return
        await asyncio.sleep(0.1)
    pytest.fail("it is still mapped, or its connection open")


async def test_many_readers_of_a_frozen_owner_do_not_wait_for_one_another(
    broker: EmbeddedServer, start: StartBlobs
) -> None:
    reader = await start()
    with run(OWNER, broker.url) as owner:
        assert owner.stdout is not None
        line = await asyncio.to_thread(owner.stdout.readline)
        ref = msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=BlobRef)
        (await reader.get(ref)).close()
        os.kill(owner.pid, signal.SIGSTOP)
        try:
            # Sequential timeouts would take half a minute.
            async with asyncio.timeout(12):
                errors = await asyncio.gather(
                    *(reader.get(ref) for _ in range(24)), return_exceptions=True
                )
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    assert all(isinstance(error, BlobLost) for error in errors), errors


async def test_a_release_reaches_an_owner_that_was_frozen(
    broker: EmbeddedServer, start: StartBlobs
) -> None:
    reader = await start()
    with run(OWNER, broker.url) as owner:
        assert owner.stdout is not None
        line = await asyncio.to_thread(owner.stdout.readline)
        ref = msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=BlobRef)
        (await reader.get(ref)).close()
        os.kill(owner.pid, signal.SIGSTOP)
        try:
            await reader.release(ref)
            os.kill(owner.pid, signal.SIGCONT)
            async with asyncio.timeout(10):
                while True:
                    try:
                        (await reader.get(ref)).close()
                    except BlobLost:
                        break
                    await asyncio.sleep(0.1)
        finally:
            os.kill(owner.pid, signal.SIGKILL)


async def test_no_release_is_repeated_for_an_owner_that_has_exited(
    broker: EmbeddedServer, start: StartBlobs
) -> None:
    """Work that waits for the release would wait for a process that is gone."""
    reader = await start()
    with run(OWNER, broker.url) as owner:
        assert owner.stdout is not None
        line = await asyncio.to_thread(owner.stdout.readline)
        os.kill(owner.pid, signal.SIGKILL)
    ref = msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=BlobRef)
    await reader.release(ref)
    assert all(task.done() for task in reader._releasing)


async def test_an_unsent_key_pins_nothing(start: StartBlobs) -> None:
    owner = await start()
    ref = put(owner, b"abc")
    owner.discard(ref)
    assert owner.load()["arena_pinned"] == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect("\0" + owner.address.local)
        await asyncio.to_thread(sock.recv, len(protocol.HELLO))
        sock.setblocking(False)
        request = protocol.BlobRequest(protocol.FIND, bytes.fromhex(NAME), 60.0)
        await protocol.send_request(sock, request)
        # The reader exits before it receives the key.
    await asyncio.sleep(0.2)
    assert owner.load()["arena_pinned"] == 0
