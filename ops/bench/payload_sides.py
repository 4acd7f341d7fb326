"""The owner and the reader of tensors in the benchmark of payloads, and each transport."""

import asyncio
import base64
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
import torch

from ops.harness.samples import Samples
from shared.blobs import protocol
from shared.blobs.buffer_pool import BufferPool
from shared.blobs.store import Blobs
from shared.blobs.transports import Blob, BusTransport, SharedMemoryTransport, TcpTransport
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.tensors import from_torch, to_torch
from shared.config.schema import BlobsConfig
from shared.protocol.messages import BlobAddress
from shared.protocol.multimodal import BlobRef

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "8 MiB": 2**23, "32 MiB": 2**25}
# The largest payload of one message, which also has a header.
MAX_INLINE = 2**23 - 2**16
BASE64 = "base64 in JSON"
MEMCPY = "memory copy"
MAKE, HELLO = "bench.make", "bench.hello"
IN_FLIGHT = 4
ARENA_MIB = 256
OWNER_IP, READER_IP = "10.213.0.1", "10.213.0.2"
NAMESPACE = "pagemill-bench"


class Head(msgspec.Struct):
    """Head of the envelope."""


class Hello(msgspec.Struct):
    """The facts about the owner that a reader needs."""

    address: BlobAddress
    http_port: int


class Measured(msgspec.Struct):
    p50_ms: float
    p99_ms: float
    gb_s: float


def parts_of(num_bytes: int) -> list[bytes | memoryview]:
    return envelope.encode_parts(Head(), [from_torch(_tensor(num_bytes))])


def _tensor(num_bytes: int) -> torch.Tensor:
    return torch.arange(num_bytes // 4, dtype=torch.float32)


async def run_owner(url: str, ip: str) -> None:
    bus = await Bus.connect(url, "owner")
    blobs = Blobs(bus, "bench", "owner", BlobsConfig(arena_mib=ARENA_MIB, listen=ip))
    await blobs.start()
    _use_all(blobs)
    parts = {num_bytes: parts_of(num_bytes) for num_bytes in SIZES.values()}
    tensors = {num_bytes: _tensor(num_bytes) for num_bytes in SIZES.values()}
    server = await asyncio.start_server(_http(tensors), ip, 0, limit=2**26)
    hello = Hello(blobs.address, server.sockets[0].getsockname()[1])

    def make(question: bytes) -> bytes:
        num_bytes, inline = msgspec.msgpack.decode(question, type=tuple[int, bool])
        if inline:
            return b"".join(parts[num_bytes])
        ref = blobs.put(secrets.token_hex(32), parts[num_bytes], 60)
        assert ref is not None, "the arena is full"
        return msgspec.msgpack.encode(ref)

    await bus.add_responder(MAKE, make)
    await bus.add_responder(HELLO, lambda _: msgspec.msgpack.encode(hello))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def _use_all(blobs: Blobs) -> None:
    """Touch all pages of the arena, because the first use of a page takes longer than later ones.

    Stored payloads are evicted for new ones.
    """
    refs = [blobs.put(secrets.token_hex(32), [bytes(2**20)], 60) for _ in range(ARENA_MIB)]
    for ref in refs:
        assert ref is not None
        blobs.discard(ref)


def _http(
    tensors: dict[int, torch.Tensor],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                tensor = tensors[int(head.split(b" ", 2)[1][1:])]
                body = as_base64(tensor)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
                writer.write(body)
                await writer.drain()

    return serve


def as_base64(tensor: torch.Tensor) -> bytes:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    packed = msgspec.msgpack.encode((str(tensor.dtype), list(tensor.shape), data))
    return json.dumps({"kwargs_data": base64.b64encode(packed).decode()}).encode()


def from_base64(body: bytes) -> torch.Tensor:
    packed = base64.b64decode(json.loads(body)["kwargs_data"])
    _, shape, data = msgspec.msgpack.decode(packed, type=tuple[str, list[int], bytes])
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)


# -- the reader ------------------------------------------------------------------------------------

Fetch = Callable[[int], Awaitable[None]]


async def run_reader(url: str, rounds: int, local: bool) -> None:
    """Measure all transports, and write the results to stdout."""
    # The other core belongs to the owner.
    torch.set_num_threads(1)
    bus = await Bus.connect(url, "reader")
    hello = msgspec.msgpack.decode(await bus.request(HELLO, b"", 5), type=Hello)
    assert hello.address.tcp is not None
    pool = BufferPool(2**28)
    transports_by_name: dict[str, SharedMemoryTransport | TcpTransport | BusTransport] = {}
    if local:
        transports_by_name["owner's memory"] = SharedMemoryTransport(hello.address.local)
    transports_by_name["socket"] = TcpTransport(hello.address.tcp, pool)
    transports_by_name["pieces over the broker"] = BusTransport(bus, "owner", pool)
    fetches: dict[str, Fetch] = {
        name: _by_transport(bus, transport) for name, transport in transports_by_name.items()
    }
    fetches["inside a message"] = _inline(bus)
    fetches[BASE64] = _by_http(hello.address.tcp[0], hello.http_port)
    fetches[MEMCPY] = _copy
    results: dict[str, dict[str, Measured]] = {name: {} for name in fetches}
    for size, num_bytes in SIZES.items():
        for name, fetch in fetches.items():
            if name == "inside a message" and num_bytes > MAX_INLINE:
                continue
            results[name][size] = await _measure(fetch, num_bytes, rounds)
    sys.stdout.buffer.write(msgspec.json.encode(results))
    sys.stdout.flush()
    os._exit(0)


async def _measure(fetch: Fetch, num_bytes: int, rounds: int) -> Measured:
    for _ in range(3):
        await fetch(num_bytes)
    took_ms = Samples()
    for _ in range(rounds):
        began_s = time.perf_counter()
        await fetch(num_bytes)
        took_ms.append(1000 * (time.perf_counter() - began_s))
    began_s = time.perf_counter()

    async def several() -> None:
        for _ in range(rounds // IN_FLIGHT):
            await fetch(num_bytes)

    await asyncio.gather(*(several() for _ in range(IN_FLIGHT)))
    took_s = time.perf_counter() - began_s
    total = num_bytes * (rounds // IN_FLIGHT) * IN_FLIGHT
    return Measured(took_ms.median, took_ms.p99, total / took_s / 1e9)


def _use(blob: Blob) -> None:
    _, tensors = envelope.decode(blob.data, Head)
    to_torch(tensors[0]).sum().item()


def _by_transport(
    bus: Bus, transport: SharedMemoryTransport | TcpTransport | BusTransport
) -> Fetch:
    async def fetch(num_bytes: int) -> None:
        question = msgspec.msgpack.encode((num_bytes, False))
        ref = msgspec.msgpack.decode(await bus.request(MAKE, question, 30), type=BlobRef)
        with await transport.get(ref) as blob:
            _use(blob)
        await transport.send(ref, protocol.RELEASE)

    return fetch


def _inline(bus: Bus) -> Fetch:
    async def fetch(num_bytes: int) -> None:
        data = await bus.request(MAKE, msgspec.msgpack.encode((num_bytes, True)), 30)
        _use(Blob(memoryview(data), lambda: None))

    return fetch


def _by_http(ip: str, port: int) -> Fetch:
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def fetch(num_bytes: int) -> None:
        if idle:
            reader, writer = idle.pop()
        else:
            reader, writer = await asyncio.open_connection(ip, port, limit=2**26)
        writer.write(b"GET /%d HTTP/1.1\r\n\r\n" % num_bytes)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(head.rpartition(b":")[2]))
        idle.append((reader, writer))
        from_base64(body).sum().item()

    return fetch


async def _copy(num_bytes: int) -> None:
    source = _sources.setdefault(num_bytes, _tensor(num_bytes))
    target = _targets.setdefault(num_bytes, torch.empty_like(source))
    target.copy_(source)
    target.sum().item()


_sources: dict[int, torch.Tensor] = {}
_targets: dict[int, torch.Tensor] = {}
