"""Senders of files, in a separate process, which ends with its standard input.

Clients hash and upload the files that they send. On the event loop of the process that measures
images, this would delay the images.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import uvloop

from ops.bench.media.clips import renamed
from ops.bench.media.serving import ask_about, send_task
from ops.harness.load import at_rate
from shared import client
from shared.bus.bus import Bus
from shared.errors import Overloaded, Unavailable
from shared.telemetry import logs

Use = Literal["stored", "asked", "refused"]
"""Use of each file: only stored, stored with a request, or with a request that must be refused."""
RECEIPT = "bench.receipt"
"""Subject that confirms the end of a request. Without an answer, the renderer would hold the task
for half a second."""


@dataclass
class Sent:
    """Counts of the sent files, and of their requests that were refused."""

    files: int = 0
    refused: int = 0
    unanswered: int = 0
    """Times when the broker did not answer, after which the next file is sent."""
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.files / self.seconds


@contextlib.asynccontextmanager
async def sending(
    url: str, file: Path, use: Use, rate: float | None = None, at_once: int = 1
) -> AsyncIterator[Sent]:
    """Send a file repeatedly, each time with another hash, at a rate or `at_once` at a time.

    The yielded counts are complete at the end.
    """
    arguments = [url, str(file), use, "--at-once", str(at_once)]
    if rate is not None:
        arguments += ["--rate", str(rate)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ops.bench.media.senders",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    counts = Sent()
    try:
        await process.stdout.readline()  # it has begun
        yield counts
    finally:
        process.stdin.close()
        report = await process.stdout.read()
        await process.wait()
    for name, value in json.loads(report).items():
        setattr(counts, name, value)


class Senders:
    def __init__(self, bus: Bus, data: bytes, use: Use) -> None:
        self._bus = bus
        self._data = data
        self._use = use
        self.sent = Sent()

    async def send(self) -> None:
        """Send a file, unless the broker is too busy."""
        try:
            await self._send()
        except (Unavailable, Overloaded):
            self.sent.unanswered += 1

    async def _send(self) -> None:
        url = await client.pin_media(self._bus, renamed(self._data))
        self.sent.files += 1
        if self._use == "stored":
            return
        request_id = await send_task(self._bus, ask_about(url), RECEIPT)
        if self._use == "refused":
            async for _ in client.follow(self._bus, request_id):
                pass
            self.sent.refused += 1

    async def send_always(self) -> None:
        while True:
            await self.send()


async def _run(args: argparse.Namespace) -> None:
    bus = await Bus.connect(args.url, "bench")
    await bus.add_responder(RECEIPT, lambda _: b"+OK")
    senders = Senders(bus, args.file.read_bytes(), args.use)
    if args.rate is None:
        works = [senders.send_always() for _ in range(args.at_once)]
    else:
        works = [at_rate(args.rate, lambda _: senders.send(), lambda _: False)]
    began = time.monotonic()
    sending = asyncio.gather(*works)
    sys.stdout.write("\n")
    sys.stdout.flush()
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([sending, ended], return_when=asyncio.FIRST_COMPLETED)
    senders.sent.seconds = time.monotonic() - began
    sys.stdout.write(json.dumps(vars(senders.sent)))
    if sending.done():
        sending.result()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await bus.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("use", choices=get_args(Use))
    parser.add_argument("--rate", type=float)
    parser.add_argument("--at-once", type=int, default=1)
    logs.configure_logging("warning", role="bench")
    uvloop.run(_run(parser.parse_args()))
