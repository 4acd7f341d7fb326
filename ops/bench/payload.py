"""Measure transports of a tensor to another process, with a copy and base64 in JSON as references.

A reader requests a tensor of a given size, gets it by one transport, sums all of it once, and
releases it. The transports take turns: the owner's memory, a socket, chunks over the broker, inside
a message, and the usual form of HTTP servers: msgpack, in base64, in JSON, over HTTP (with the
standard library alone, which is faster than a framework).

With --namespaces, owner and reader are in separate network namespaces (needs root), as on two
machines: they have no shared memory.

    python -m ops.bench.payload [--namespaces]
"""

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
import uvloop
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from ops.bench.payload_sides import (
    BASE64,
    NAMESPACE,
    OWNER_IP,
    READER_IP,
    SIZES,
    Head,
    Measured,
    as_base64,
    run_owner,
    run_reader,
)
from ops.harness.tables import console, print_table
from shared.bus.embedded_server import find_binary, free_port
from shared.codec import envelope
from shared.codec.tensors import from_torch
from shared.helpers.forking import end_with_parent
from shared.telemetry import logs

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
    results = msgspec.json.decode(output, type=dict[str, dict[str, Measured]])
    where = "two network namespaces" if apart else "one machine"
    columns = ("transport", *(f"{size}: p50 / p99 ms, GB/s" for size in SIZES))
    rows = [
        (name, *(_cell(by_size.get(size), results[BASE64][size]) for size in SIZES))
        for name, by_size in results.items()
    ]
    print_table(f"tensor to tensor on {where}; x: of base64 in JSON", columns, rows)
    console.print(_image_bytes())


def _cell(measured: Measured | None, slow: Measured) -> str:
    if measured is None:
        return "-"
    return (
        f"{measured.p50_ms:.2f} / {measured.p99_ms:.2f} ({slow.p50_ms / measured.p50_ms:.1f}x),"
        f" {measured.gb_s:.2f} ({measured.gb_s / slow.gb_s:.1f}x)"
    )


def _image_bytes() -> str:
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
        f"a 1280 x 720 image: {ours:,} bytes as one 8-bit frame with its table,"
        f" {theirs:,} as float32 in base64: 1/{theirs / ours:.1f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="transfers of each size")
    parser.add_argument("--namespaces", action="store_true", help="no shared memory; needs root")
    parser.add_argument("--owner", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.owner:
        logs.configure_logging("warning", role="bench")
        uvloop.run(run_owner(*options.owner))
    elif options.reader:
        logs.configure_logging("warning", role="bench")
        uvloop.run(run_reader(options.reader, options.rounds, not options.apart))
    else:
        main(options.rounds, options.namespaces)
