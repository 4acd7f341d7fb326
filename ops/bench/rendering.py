"""Measure rendering: the first request after a start, later requests, and requests per second.

Real renderer processes run behind a real broker; a sink replaces the engine.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import uvloop
from PIL import Image
from rich.console import Console
from rich.table import Table

from shared import client
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.bus.embedded_server import EmbeddedServer
from shared.codec import envelope
from shared.config import Config
from shared.protocol import subjects
from shared.protocol.renderer_rpc import ErrorReply
from shared.protocol.requests import GenerateRequest, ImagePart, ImageURL, Message, Prompt, TextPart
from shared.protocol.task_messages import EngineBody, RenderBody, RequestTicket, Task, TaskHeader
from shared.telemetry import logs
from workers.cli import settings
from workers.cli.local_cluster import LocalCluster
from workers.roles import WorkerSpec

MODEL = "demo"
SIZE = (448, 448)

_numbers = itertools.count()

Ask = Callable[[list[Message]], Awaitable[None]]


def question(seed: int) -> list[Message]:
    """Return a request about an image that no other seed has."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    image = Image.fromarray(corners).resize(SIZE, Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [Message("user", [ImagePart(ImageURL(url)), TextPart("What is it?")])]


def questions() -> Iterator[list[Message]]:
    return map(question, _numbers)


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
        return cls(bus, await bus.consume(subjects.STAGES_STREAM, durable, where, 32, 30.0))

    async def ask(self, messages: list[Message]) -> None:
        await self.send(messages)
        await self.take()

    async def send(self, messages: list[Message]) -> str:
        """Publish a task, and return the request's id."""
        return await send_task(self._bus, messages)

    async def take(self) -> None:
        await self.take_id()

    async def take_id(self) -> str:
        """Receive a result, and return its request's id."""
        async with asyncio.timeout(60):
            delivery = await self._inbox.next()
        await delivery.ack()
        task, _ = envelope.decode(delivery.data, Task[EngineBody])
        return task.header.request_id


async def preview(bus: Bus, messages: list[Message]) -> None:
    answer = await client.render(bus, GenerateRequest(MODEL, messages))
    assert not isinstance(answer, ErrorReply), answer


@contextlib.asynccontextmanager
async def renderers(config: Config, url: str, count: int, log_file: Path) -> AsyncIterator[None]:
    """Start new processes; yield when they are ready."""
    specs = [WorkerSpec("renderer")] * count
    cluster = LocalCluster(config, None, specs, url, log_file)
    try:
        await cluster.start()
        yield
    finally:
        await cluster.stop()


async def measure_first(ask: Ask, count: int) -> tuple[float, float]:
    """Return the milliseconds of the first request, and the median of `count` later ones."""
    took_ms = []
    for messages in itertools.islice(questions(), 1 + count):
        began = time.perf_counter()
        await ask(messages)
        took_ms.append(1000 * (time.perf_counter() - began))
    return took_ms[0], statistics.median(took_ms[1:])


async def measure_rate(sink: Sink, asked: list[list[Message]]) -> float:
    """Return the requests per second, all of them sent at once."""
    began = time.perf_counter()
    sending = asyncio.gather(*(sink.send(messages) for messages in asked))
    for _ in asked:
        await sink.take()
    await sending
    return len(asked) / (time.perf_counter() - began)


async def table_of_firsts(
    config: Config, url: str, log_file: Path, args: argparse.Namespace
) -> Table:
    table = Table(
        title=f"first request against the median of {args.count}, {args.starts} fresh processes"
        " each",
        title_justify="left",
    )
    table.add_column("path")
    for name in ("first ms", "median ms", "first / median", "of each start"):
        table.add_column(name, justify="right")
    bus = await Bus.connect(url, "bench")
    sink = await Sink.open(bus)
    paths: dict[str, Ask] = {"main": sink.ask, "readonly": lambda asked: preview(bus, asked)}
    # This process has first-time costs as well.
    async with renderers(config, url, 1, log_file):
        for ask in paths.values():
            await measure_first(ask, 5)
    for name, ask in paths.items():
        measured = []
        for _ in range(args.starts):
            async with renderers(config, url, 1, log_file):
                measured.append(await measure_first(ask, args.count))
        ratios = [first / median for first, median in measured]
        table.add_row(
            name,
            f"{statistics.median(first for first, _ in measured):.1f}",
            f"{statistics.median(median for _, median in measured):.1f}",
            f"{statistics.median(ratios):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
        )
    await bus.close()
    return table


async def table_of_rates(
    config: Config, url: str, log_file: Path, args: argparse.Namespace
) -> Table:
    table = Table(
        title=f"requests a second, {args.requests} at once, one picture of"
        f" {SIZE[0]} x {SIZE[1]} each",
        title_justify="left",
    )
    table.add_column("renderer processes")
    for name in ("distinct pictures", "a picture seen before"):
        table.add_column(name, justify="right")
    bus = await Bus.connect(url, "bench")
    sink = await Sink.open(bus)
    for count in (1, 2):
        async with renderers(config, url, count, log_file):
            await measure_rate(sink, list(itertools.islice(questions(), 8)))
            distinct = list(itertools.islice(questions(), args.requests))
            fresh = await measure_rate(sink, distinct)
            again = await measure_rate(sink, [distinct[0]] * args.requests)
        table.add_row(str(count), f"{fresh:.0f}", f"{again:.0f}")
    await bus.close()
    return table


async def main(args: argparse.Namespace) -> None:
    logs.configure_logging("warning", role="bench")
    config = settings.load_config(None)
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        broker = EmbeddedServer(Path(folder) / "nats")
        broker.start()
        try:
            bus = await Bus.connect(broker.url, "bench")
            await bus.prepare(config.nats, config.delivery)
            await bus.close()
            log_file = Path(folder) / "workers.log"
            for measure in (table_of_firsts, table_of_rates):
                Console().print(await measure(config, broker.url, log_file, args))
        finally:
            broker.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--requests", type=int, default=200)
    uvloop.run(main(parser.parse_args()))
