"""Measure the latency between stages, against one bare publish and delivery by the same broker.

It is the time from the moment a worker has finished its part to the moment the next one has the
message: encoding, publishing, the broker's sync to disk, delivery.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.protocol import subjects
from shared.protocol.records import Finish, StageSpan
from shared.protocol.requests import GenerateRequest
from shared.telemetry import logs
from workers.cli import settings
from workers.cli.ask import build_request
from workers.cli.local_cluster import LocalCluster
from workers.roles import default_workers


async def measure_floor(bus: Bus, count: int) -> list[float]:
    """Return the milliseconds from publish to delivery of small messages on a work queue."""
    consumer = await bus.consume(
        subjects.STAGES_STREAM,
        "bench",
        subjects.stage_filter("renderer", "bench", "batch"),
        4,
        30.0,
    )
    took_ms = []
    for number in range(count):
        began = time.perf_counter()
        subject = subjects.stage("renderer", "bench", "batch", str(number))
        publishing = asyncio.create_task(bus.publish(subject, b"x" * 200, f"bench-{number}"))
        delivery = await consumer.next()
        took_ms.append(1000 * (time.perf_counter() - began))
        await publishing
        await delivery.ack()
    await consumer.stop()
    return took_ms


async def measure_path(bus: Bus, request: GenerateRequest, count: int) -> dict[str, list[float]]:
    """Return the milliseconds between stages, one request at a time, by pair of stages."""
    found: dict[str, list[float]] = {}
    for _ in range(count):
        sent_ms = time.time() * 1000
        async for record in ask(bus, request, new_request_id()):
            if isinstance(record, Finish):
                for name, took_ms in _hand_overs(sent_ms, record.path):
                    found.setdefault(name, []).append(took_ms)
    return found


def _hand_overs(sent_ms: float, path: list[StageSpan]) -> list[tuple[str, float]]:
    start = StageSpan("client", "", 1, sent_ms, sent_ms)
    hops = [start, *path]
    return [
        (f"{a.stage} → {b.stage}", b.received_ms - a.sent_ms) for a, b in itertools.pairwise(hops)
    ]


def add_row(table: Table, name: str, took_ms: list[float], floor_ms: float) -> None:
    cuts = statistics.quantiles(took_ms, n=100)
    table.add_row(name, f"{cuts[49]:.2f}", f"{cuts[98]:.2f}", f"{cuts[49] / floor_ms:.2f}")


async def main(count: int) -> None:
    config = settings.load_config(None)
    logs.configure_logging("warning", role="bench")
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        nats = msgspec.structs.replace(config.nats, port=0, store_dir=folder)
        config = msgspec.structs.replace(config, nats=nats)
        log_file = Path(folder) / "workers.log"
        cluster = LocalCluster(config, None, default_workers(config), log_file=log_file)
        table = Table(title=f"hand-over, {count} requests one at a time", title_justify="left")
        table.add_column("from → to")
        for name in ("p50 ms", "p99 ms", "p50 / bare"):
            table.add_column(name, justify="right")
        try:
            await cluster.start()
            bus = await Bus.connect(cluster.url, "bench")
            floor = await measure_floor(bus, count)
            floor_ms = statistics.median(floor)
            add_row(table, "bare publish → delivery", floor, floor_ms)
            one_token = {"max_tokens": 1}
            for title, images in (("text", []), ("picture", [IMAGES / "red.png"])):
                request = build_request("demo", "What color is it?", images, one_token)
                await measure_path(bus, request, 5)
                for name, took_ms in (await measure_path(bus, request, count)).items():
                    add_row(table, f"{name} ({title})", took_ms, floor_ms)
            await bus.close()
        finally:
            await cluster.stop()
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    uvloop.run(main(parser.parse_args().count))
