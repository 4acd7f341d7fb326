"""Videos in a real renderer process: requests a second, and images beside other videos."""

import asyncio
import base64
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ops.bench.media.clips import renamed
from ops.bench.rendering import Sink, question, renderers
from shared import client
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config import Config
from shared.protocol.requests import Message, TextPart, VideoPart, VideoURL
from workers.cli import settings

ATTACKERS = 4
"""Hostile videos in flight."""
SENDERS = 4
"""New clips in flight."""


def ask_about(url: str) -> list[Message]:
    return [Message("user", [VideoPart(VideoURL(url)), TextPart("What moves?")])]


def to_url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Bus, Sink]]:
    """Start a broker and a renderer of the demo model; yield when they are ready."""
    config: Config = settings.load_config(None)
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        broker = EmbeddedServer(Path(folder) / "nats")
        broker.start()
        try:
            bus = await Bus.connect(broker.url, "bench")
            await bus.prepare(config.nats, config.delivery)
            sink = await Sink.open(bus)
            async with renderers(config, broker.url, 1, Path(folder) / "workers.log"):
                yield bus, sink
            await bus.close()
        finally:
            broker.stop()


async def measure_rates(bus: Bus, sink: Sink, clip: bytes, count: int) -> tuple[float, float]:
    """Return the requests per second of new files, and of one file again and again."""
    urls = [await client.pin_media(bus, renamed(clip)) for _ in range(count)]
    await sink.ask(ask_about(urls[0]))  # the first one imports torch
    fresh = await _rate(sink, urls[1:])
    return fresh, await _rate(sink, [urls[0]] * 20 * count)


async def _rate(sink: Sink, urls: Sequence[str]) -> float:
    began = time.perf_counter()
    sending = asyncio.gather(*(sink.send(ask_about(url)) for url in urls))
    for _ in urls:
        await sink.take()
    await sending
    return len(urls) / (time.perf_counter() - began)


async def measure_images(sink: Sink, count: int, numbers: Iterator[int]) -> tuple[float, float]:
    """Return p50 and p95 in milliseconds of requests with new images, one after the other."""
    took_ms = []
    for seed in itertools.islice(numbers, count):
        began = time.perf_counter()
        await sink.ask(question(seed))
        took_ms.append(1000 * (time.perf_counter() - began))
    p50_ms, p95_ms = np.percentile(took_ms, [50, 95])
    return float(p50_ms), float(p95_ms)


async def measure_beside_clips(
    sink: Sink, bus: Bus, clip: bytes, count: int, numbers: Iterator[int]
) -> tuple[float, float, float]:
    """Return p50 and p95 in milliseconds of new images while new clips are sent all the time.

    The third number is that of clips a second.
    """
    waiting: dict[str, asyncio.Future[None]] = {}
    num_clips = 0

    async def take_all() -> None:
        while True:
            request_id = await sink.take_id()
            waiting.setdefault(request_id, loop.create_future()).set_result(None)

    async def ask(messages: list[Message]) -> None:
        request_id = await sink.send(messages)
        await waiting.setdefault(request_id, loop.create_future())
        del waiting[request_id]

    async def send_clips() -> None:
        nonlocal num_clips
        while True:
            await ask(ask_about(await client.pin_media(bus, renamed(clip))))
            num_clips += 1

    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(send_clips()) for _ in range(SENDERS)]
    tasks.append(asyncio.create_task(take_all()))
    took_ms = []
    try:
        began = time.perf_counter()
        for seed in itertools.islice(numbers, count):
            sent = time.perf_counter()
            await ask(question(seed))
            took_ms.append(1000 * (time.perf_counter() - sent))
        rate = num_clips / (time.perf_counter() - began)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    p50_ms, p95_ms = np.percentile(took_ms, [50, 95])
    return float(p50_ms), float(p95_ms), rate


@contextlib.asynccontextmanager
async def under_attack(sink: Sink, bus: Bus, bomb: bytes) -> AsyncIterator[Callable[[], int]]:
    """Keep hostile videos in flight, each with another hash; yield a count of those refused."""
    refused = 0

    async def attack() -> None:
        nonlocal refused
        while True:
            url = await client.pin_media(bus, renamed(bomb))
            request_id = await sink.send(ask_about(url))
            async for _ in client.follow(bus, request_id):
                pass
            refused += 1

    attackers = [asyncio.create_task(attack()) for _ in range(ATTACKERS)]
    try:
        yield lambda: refused
    finally:
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
