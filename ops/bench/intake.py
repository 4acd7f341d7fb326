"""Measure where the first tokens of a burst spend their time, stage by stage.

All requests are sent at once over the bus, and the spans in the last record of each say when the
task of a stage was received and when its result was sent. The table has the milliseconds from the
first request on, the log on disk: the least, the median and the greatest of a burst, and of these
the medians of the bursts. An engine sends its result at the end of the answer.

    python -m ops.bench.intake [--model random-135m] [--requests 32] [--rounds 5]
"""

import argparse
import asyncio
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from ops.bench.durability import DEMO, MODEL, RANDOM, Prompts, Site, cluster
from ops.bench.models import write_random_llama
from shared.client import ask, new_request_id
from shared.protocol.records import Failure, Finish, TokenChunk
from shared.protocol.requests import GenerateRequest
from shared.telemetry import logs
from workers.cli import settings

MAX_TOKENS = 64
FIRST_TOKEN = "first token at the client"

Events = dict[str, list[float]]
"""Times of all requests on the broker's clock, by event."""


async def run_burst(site: Site, prompts: Prompts, num_requests: int) -> Events:
    """Return the times of a burst, from its first request on."""
    events: Events = defaultdict(list)

    async def follow_one() -> None:
        events["sent by the client"].append(site.bus.now_ms())
        request = GenerateRequest(MODEL, prompts.messages(), prompts.sampling)
        has_begun = False
        async for record in ask(site.bus, request, new_request_id()):
            match record:
                case TokenChunk() if not has_begun:
                    has_begun = True
                    events[FIRST_TOKEN].append(site.bus.now_ms())
                case Finish():
                    for span in record.path:
                        events[f"{span.stage}: received"].append(span.received_ms)
                        events[f"{span.stage}: sent"].append(span.sent_ms)
                case Failure():
                    raise RuntimeError(record.error.message)

    await asyncio.gather(*(follow_one() for _ in range(num_requests)))
    began_ms = min(events["sent by the client"])
    return {name: [time_ms - began_ms for time_ms in times] for name, times in events.items()}


def report(bursts: list[Events]) -> Table:
    table = Table("event", "first, ms", "median", "last")
    for name in sorted(bursts[0], key=lambda name: median(bursts[0][name])):
        cells = (median(of(burst[name]) for burst in bursts) for of in (min, median, max))
        table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
    return table


async def main(model: str, num_requests: int, rounds: int) -> Table:
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        served = {"path": str(settings.DEMO_MODEL), "dtype": "float32"}
        if model == RANDOM:
            served = {"path": str(Path(name) / "model"), "dtype": "bfloat16"}
            write_random_llama(Path(name) / "model", settings.DEMO_MODEL)
        file = Path(name) / "pagemill.yaml"
        file.write_bytes(msgspec.json.encode({"models": {MODEL: served}}))
        config = settings.load_config(file)
        prompts = Prompts(config, MAX_TOKENS)
        async with cluster(config, file, "file") as site:
            bursts = [await run_burst(site, prompts, num_requests) for _ in range(rounds + 1)]
    # The first burst compiles and fills caches.
    return report(bursts[1:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(DEMO, RANDOM), default=DEMO)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    logs.configure_logging("warning", role="bench")
    Console().print(uvloop.run(main(given.model, given.requests, given.rounds)))
