"""A real renderer process, requests with videos and images, and a sink for their results."""

import asyncio
import base64
import contextlib
import io
import itertools
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np
from PIL import Image

from ops.bench.media.clips import renamed
from ops.harness.deployment import demo_tree, deployment
from ops.harness.samples import Samples
from shared import client
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.codec import envelope
from shared.protocol import subjects
from shared.protocol.requests import (
    ImagePart,
    ImageURL,
    Message,
    Prompt,
    TextPart,
    VideoPart,
    VideoURL,
)
from shared.protocol.task_messages import EngineBody, RenderBody, RequestTicket, Task, TaskHeader
from workers.roles import WorkerSpec

MODEL = "demo"
SIZE = (448, 448)


def question(seed: int) -> list[Message]:
    """Return a request about an image that no other seed has."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    image = Image.fromarray(corners).resize(SIZE, Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [Message("user", [ImagePart(ImageURL(url)), TextPart("What is it?")])]


def ask_about(url: str) -> list[Message]:
    return [Message("user", [VideoPart(VideoURL(url)), TextPart("What moves?")])]


async def send_task(bus: Bus, messages: list[Message], receipt: str = "$JS.ACK.none") -> str:
    """Publish a task to render, and return the request's id.

    A worker that ends the request confirms it by the receipt, to a queue that has no such request.
    """
    now_ms = bus.now_ms()
    request_id = client.new_request_id()
    # No coordinator asked for this task, so that no request is stored for it.
    ticket = RequestTicket(now_ms, now_ms + 600_000, 1, receipt)
    header = TaskHeader(request_id, MODEL, subjects.LANES[0], ticket)
    data = envelope.encode(Task(header, RenderBody(Prompt(messages))), [])
    subject = subjects.stage("renderer", MODEL, header.lane, request_id)
    await bus.publish(subject, data, request_id)
    return request_id


class Sink:
    """Render by the main path, and receive the result."""

    def __init__(self, bus: Bus, inbox: Consumer) -> None:
        self._bus = bus
        self._inbox = inbox

    @classmethod
    async def open(cls, bus: Bus) -> "Sink":
        lane = subjects.LANES[0]
        durable = subjects.stage_consumer("engine", MODEL, lane)
        where = subjects.stage_filter("engine", MODEL, lane)
        return cls(bus, await bus.queues.consume(subjects.STAGES_STREAM, durable, where, 32, 30.0))

    async def ask(self, messages: list[Message]) -> None:
        await self.send(messages)
        await self.take()

    async def send(self, messages: list[Message]) -> str:
        """Publish a task, and return the request's id."""
        return await send_task(self._bus, messages)

    async def take(self) -> str:
        """Receive a result, and return its request's id."""
        async with asyncio.timeout(60):
            delivery = await self._inbox.next()
        await delivery.ack()
        task, _ = envelope.decode(delivery.data, Task[EngineBody])
        return task.header.request_id


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
