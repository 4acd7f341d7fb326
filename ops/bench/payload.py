"""Measure the way of a tensor to another process: each transport, a copy, and base64 in JSON.

A reader requests a tensor of a given size, gets it by one transport, sums all of it once, and
releases it. In turn: the owner's memory, a socket, chunks over the broker, inside a message, and
the usual form of HTTP servers: msgpack, in base64, in JSON, over HTTP (with the standard library
alone, which is faster than a framework).

With --namespaces owner and reader are in network namespaces of their own (needs root), as on two
machines: they have no shared memory.

    python -m ops.bench.payload [--namespaces]
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
import uvloop
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import Qwen2VLImageProcessorPil

from shared.blobs import protocol
from shared.blobs.buffer_pool import BufferPool
from shared.blobs.store import Blobs
from shared.blobs.transports import Blob, BusTransport, SharedMemoryTransport, TcpTransport
from shared.bus.bus import Bus
from shared.bus.embedded_server import end_with_parent, find_binary, free_port
from shared.codec import envelope
from shared.codec.tensors import from_torch, to_torch
from shared.config import BlobsConfig
from shared.protocol.messages import BlobAddress
from shared.protocol.multimodal import BlobRef
from shared.telemetry import logs

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "8 MiB": 2**23, "32 MiB": 2**25}
# This much fits into one message beside its header.
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


# -- the owner -------------------------------------------------------------------------------------


async def run_owner(url: str, ip: str) -> None:
    bus = await Bus.connect(url, "owner")
    blobs = Blobs(bus, "bench", "owner", BlobsConfig(arena_mib=ARENA_MIB, listen=ip))
    await blobs.start()
    _use_all(blobs)
    made = {num_bytes: parts_of(num_bytes) for num_bytes in SIZES.values()}
    tensors = {num_bytes: _tensor(num_bytes) for num_bytes in SIZES.values()}
    server = await asyncio.start_server(_http(tensors), ip, 0, limit=2**26)
    hello = Hello(blobs.address, server.sockets[0].getsockname()[1])

    def make(question: bytes) -> bytes:
        num_bytes, inline = msgspec.msgpack.decode(question, type=tuple[int, bool])
        if inline:
            return b"".join(made[num_bytes])
        ref = blobs.put(secrets.token_hex(32), made[num_bytes], 60)
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
    found: dict[str, dict[str, Measured]] = {name: {} for name in fetches}
    for size, num_bytes in SIZES.items():
        for name, fetch in fetches.items():
            if name == "inside a message" and num_bytes > MAX_INLINE:
                continue
            found[name][size] = await _measure(fetch, num_bytes, rounds)
    sys.stdout.buffer.write(msgspec.json.encode(found))
    sys.stdout.flush()
    os._exit(0)


async def _measure(fetch: Fetch, num_bytes: int, rounds: int) -> Measured:
    for _ in range(3):
        await fetch(num_bytes)
    took_ms = []
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
    cuts = statistics.quantiles(took_ms, n=100)
    return Measured(cuts[49], cuts[98], total / took_s / 1e9)


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


# -- the report ------------------------------------------------------------------------------------


@contextlib.contextmanager
def namespaces() -> Iterator[list[str]]:
    """Create a second namespace with a cable to this one; yield a command prefix for it."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", "pmb0", "type", "veth", "peer", "name", "pmb1", "netns", NAMESPACE)
        ip("addr", "add", f"{OWNER_IP}/24", "dev", "pmb0")
        ip("link", "set", "pmb0", "up")
        ip("-n", NAMESPACE, "addr", "add", f"{READER_IP}/24", "dev", "pmb1")
        ip("-n", NAMESPACE, "link", "set", "pmb1", "up")
        yield ["ip", "netns", "exec", NAMESPACE]
    finally:
        # The cable is removed with its end.
        ip("netns", "del", NAMESPACE)


@contextlib.contextmanager
def broker(folder: Path, ip: str) -> Iterator[str]:
    """Run a server with our limits on `ip`, without persistent storage."""
    config, port = folder / "nats.conf", free_port()
    config.write_text(f"host: {ip}\nport: {port}\nmax_payload: 8MB\nmax_pending: 512MB\n")
    with subprocess.Popen(
        [find_binary(), "-c", str(config)], stderr=subprocess.DEVNULL, preexec_fn=end_with_parent
    ) as process:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((ip, port), 1):
                break
            time.sleep(0.05)
        yield f"nats://{ip}:{port}"
        process.kill()


def main(rounds: int, apart: bool) -> None:
    console = Console(width=120)
    with contextlib.ExitStack() as stack:
        prefix = stack.enter_context(namespaces()) if apart else []
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-bench-"))
        ip = OWNER_IP if apart else "127.0.0.1"
        url = stack.enter_context(broker(Path(folder), ip))
        this = [sys.executable, "-m", "ops.bench.payload"]
        owner = stack.enter_context(
            subprocess.Popen([*this, "--owner", url, ip], stdout=subprocess.PIPE)
        )
        stack.callback(owner.kill)
        assert owner.stdout is not None
        owner.stdout.readline()
        reader = [*prefix, *this, "--reader", url, "--rounds", str(rounds)]
        output = subprocess.run(
            [*reader, *(["--apart"] if apart else [])], stdout=subprocess.PIPE, check=True
        ).stdout
    found = msgspec.json.decode(output, type=dict[str, dict[str, Measured]])
    where = "two network namespaces" if apart else "one machine"
    table = Table(title=f"tensor to tensor on {where}; x: of base64 in JSON", title_justify="left")
    table.add_column("transport")
    for size in SIZES:
        table.add_column(f"{size}: p50 / p99 ms, GB/s", justify="right")
    for name, by_size in found.items():
        cells = []
        for size in SIZES:
            m, slow = by_size.get(size), found[BASE64][size]
            if m is None:
                cells.append("-")
                continue
            ratio = slow.p50_ms / m.p50_ms
            cells.append(
                f"{m.p50_ms:.2f} / {m.p99_ms:.2f} ({ratio:.1f}x), {m.gb_s:.2f}"
                f" ({m.gb_s / slow.gb_s:.1f}x)"
            )
        table.add_row(name, *cells)
    console.print(table)
    console.print(_picture_bytes())


def _picture_bytes() -> str:
    """Print the sizes of a 720p image on the wire, in our form and in vLLM's."""
    pixels = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil()
    whole = processor(images=[Image.fromarray(pixels)], return_tensors="pt")["pixel_values"]
    theirs = len(as_base64(whole))
    patch_len = processor.patch_size**2
    frame = whole.reshape(len(whole), -1, processor.temporal_patch_size, patch_len)[:, :, 0]
    table = torch.zeros(3, 256)
    ours = len(
        envelope.encode(Head(), [from_torch(frame.contiguous().to(torch.uint8)), from_torch(table)])
    )
    return (
        f"a 1280 x 720 picture: {ours:,} bytes as one 8-bit frame with its table,"
        f" {theirs:,} as float32 in base64: 1/{theirs / ours:.1f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--namespaces", action="store_true")
    parser.add_argument("--owner", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.owner:
        logs.configure_logging("warning", role="bench")
        uvloop.run(run_owner(*given.owner))
    elif given.reader:
        logs.configure_logging("warning", role="bench")
        uvloop.run(run_reader(given.reader, given.rounds, not given.apart))
    else:
        main(given.rounds, given.namespaces)
