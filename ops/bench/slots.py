"""Measure slots: two engines of the demo model with one queue, and with 16 slots.

- chats: 16 conversations of 6 turns and 8 images with 10 questions each; KV pools hold half of them
- one beginning: questions about one long text, of which every engine could hold all
- frozen: one of the engines stops while requests are in its queues

`python -m ops.bench.slots [ROUNDS]` prints medians of the rounds, which take turns.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.protocol.records import Finish, TokenChunk
from shared.protocol.requests import GenerateRequest, ImagePart, ImageURL, Message, TextPart
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs
from workers.cli import settings
from workers.cli.ask import data_url
from workers.cli.local_cluster import LocalCluster
from workers.roles import default_workers

MODEL = "demo"
SLOTS = (1, 16)
NUM_CHATS, NUM_TURNS, NUM_QUESTIONS = 16, 6, 10
TURN_WORDS = 12
AT_ONCE = 6
ACK_WAIT_S = 4.0
SAMPLING = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NUM_BLOCKS = 900
"""KV blocks of an engine, of 8 tokens."""


@dataclass(slots=True)
class Answer:
    text: str
    worker: str
    took_s: float


@dataclass(slots=True)
class Round:
    """What one round with one number of slots has shown."""

    hit_rate: float
    chat_p99_s: float
    hot_share: float
    """Of requests with one beginning, the part of the engine that had more of them."""
    hot_s: float
    frozen_s: float
    """From the stop to the last answer."""


@dataclass(slots=True)
class Site:
    bus: Bus
    cluster: LocalCluster

    async def ask(self, messages: list[Message]) -> Answer:
        began_s, text, worker = time.perf_counter(), "", ""
        request = GenerateRequest(MODEL, messages, SAMPLING)
        async for record in ask(self.bus, request, new_request_id()):
            if isinstance(record, TokenChunk):
                text += "".join(choice.text for choice in record.choices)
            elif isinstance(record, Finish):
                worker = record.path[-1].worker
            else:
                raise SystemExit(f"a request has failed: {record}")
        return Answer(text, worker, time.perf_counter() - began_s)

    async def cached(self) -> tuple[float, float]:
        """Return the prompt tokens of all engines, and those from their caches."""
        loads = [b.load for b in await self.bus.read_heartbeats() if b.role == "engine"]
        queries = sum(load["prefix_query_tokens"] for load in loads)
        return queries, sum(load["prefix_hit_tokens"] for load in loads)


@contextlib.asynccontextmanager
async def site(folder: Path, slots: int) -> AsyncIterator[Site]:
    file = folder / "pagemill.yaml"
    model = {
        "path": str(settings.DEMO_MODEL),
        "max_model_len": 2048,
        "slots": slots,
        "stages": {"engine": {"replicas": 2}},
    }
    tree = {
        "models": {MODEL: model},
        "nats": {"port": 0, "store_dir": str(folder / "nats")},
        "delivery": {"ack_wait_s": ACK_WAIT_S},
        "engine": {"block_size": 8, "num_blocks": NUM_BLOCKS, "max_num_seqs": 8, "threads": 1},
    }
    file.write_bytes(msgspec.json.encode(tree))
    config = settings.load_config(file)
    cluster = LocalCluster(config, file, default_workers(config), log_file=folder / "workers.log")
    try:
        await cluster.start()
        bus = await Bus.connect(cluster.url, "bench")
        yield Site(bus, cluster)
        await bus.close()
    finally:
        await cluster.stop()


# -- the loads ------------------------------------------------------------------------------------


def words(rng: random.Random, number: int) -> str:
    return " ".join(str(rng.randrange(100, 1000)) for _ in range(number))


async def chats(site: Site, rng: random.Random) -> list[float]:
    """Return the seconds of each answer. The turns of a chat follow each other."""
    credit = asyncio.Semaphore(AT_ONCE)
    took_s: list[float] = []

    async def one(messages: list[Message]) -> str:
        async with credit:
            answer = await site.ask(messages)
        took_s.append(answer.took_s)
        return answer.text

    async def chat(messages: list[Message]) -> None:
        for _ in range(NUM_TURNS):
            messages = [*messages, Message("user", words(rng, TURN_WORDS))]
            messages = [*messages, Message("assistant", await one(messages))]

    async def questions(image: Path) -> None:
        url = ImageURL(data_url(image))
        for _ in range(NUM_QUESTIONS):
            await one([Message("user", [ImagePart(url), TextPart(words(rng, 4))])])

    images = sorted(path for path in IMAGES.iterdir() if path.suffix in (".png", ".jpg"))[:8]
    begin = [Message("system", words(rng, TURN_WORDS)) for _ in range(NUM_CHATS)]
    await gather([*(chat([one]) for one in begin), *map(questions, images)])
    return took_s


async def one_beginning(site: Site, rng: random.Random) -> list[Answer]:
    text = words(rng, 60)
    return await gather(site.ask([Message("user", f"{text} {words(rng, 2)}")]) for _ in range(64))


async def frozen(site: Site, rng: random.Random) -> float:
    """Return the time to the last answer, with an engine that stops as the first ones begin."""
    pid = site.cluster.pids("engine")[0]
    began_s = time.perf_counter()
    asked = asyncio.gather(*(site.ask([Message("user", words(rng, 40))]) for _ in range(24)))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asked
        return time.perf_counter() - began_s
    finally:
        os.kill(pid, signal.SIGCONT)


async def gather(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*work))


# -- the report ------------------------------------------------------------------------------------


async def measure(slots: int, seed: int) -> Round:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        async with site(Path(folder), slots) as running:
            await asyncio.sleep(2.5)  # Heartbeats have made the owners known.
            before = await running.cached()
            took_s = sorted(await chats(running, rng))
            await asyncio.sleep(1.5)  # Heartbeats have the figures of the last requests.
            queries, hits = (b - a for a, b in zip(before, await running.cached(), strict=True))
            began_s = time.perf_counter()
            hot = Counter(answer.worker for answer in await one_beginning(running, rng))
            hot_s = time.perf_counter() - began_s
            return Round(
                hits / queries,
                took_s[int(0.99 * len(took_s))],
                max(hot.values()) / hot.total(),
                hot_s,
                await frozen(running, rng),
            )


async def main(rounds: int) -> None:
    logs.configure_logging("error", role="bench")
    found: dict[int, list[Round]] = {slots: [] for slots in SLOTS}
    for seed in range(rounds):
        for slots in SLOTS:
            found[slots].append(await measure(slots, seed))
    shown = {
        slots: {name: median(getattr(one, name) for one in some) for name in Round.__annotations__}
        for slots, some in found.items()
    }
    one, many = (shown[slots] for slots in SLOTS)
    for name in Round.__annotations__:
        ratio = many[name] / one[name]
        sys.stdout.write(f"{name:<12} {one[name]:7.3f} {many[name]:7.3f} {ratio:6.2f}\n")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
