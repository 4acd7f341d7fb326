"""Requests with videos and images to a real renderer process."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence

from ops.bench.media.clips import renamed
from ops.bench.media.renderers import Sink, question
from ops.bench.media.senders import ask_about
from ops.harness.deployment import demo_tree, deployment
from ops.harness.samples import Samples
from shared import client
from shared.bus.bus import Bus
from shared.protocol.requests import Message
from workers.roles import WorkerSpec


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Bus, Sink, str]]:
    """Start a renderer of the demo model; yield a client, its sink and the broker's URL."""
    # Clips are longer than the usual context of the demo. The coordinator makes the streams.
    tree = demo_tree(max_model_len=None)
    workers = [WorkerSpec("coordinator"), WorkerSpec("renderer")]
    async with deployment(tree, workers=workers) as site, site.bus() as bus:
        yield bus, await Sink.open(bus), site.url


async def measure_rates(bus: Bus, sink: Sink, clip: bytes, count: int) -> tuple[float, float]:
    """Return the requests per second of new files, and of one repeated file."""
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


class Images:
    """Requests with new images, one after the other, while other requests run.

    It is a context manager, and belongs to one event loop.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._taking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Images":
        self._taking = asyncio.create_task(self._take_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._taking is not None
        self._taking.cancel()
        await asyncio.gather(self._taking, return_exceptions=True)

    async def ask(self, messages: list[Message]) -> None:
        request_id = await self._sink.send(messages)
        async with asyncio.timeout(60):
            await self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        del self._waiting[request_id]

    async def measure(self, count: int) -> Samples:
        """Return the milliseconds of each request."""
        took_ms = Samples()
        for seed in itertools.islice(self._numbers, count):
            messages = question(seed)
            began = time.perf_counter()
            await self.ask(messages)
            took_ms.append(1000 * (time.perf_counter() - began))
        return took_ms

    async def _take_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            request_id = await self._sink.take()
            self._waiting.setdefault(request_id, loop.create_future()).set_result(None)
