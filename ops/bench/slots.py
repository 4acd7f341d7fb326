"""Measure slots: two engines with one queue and with 16 slots, and one engine with both KV pools.

- chats: 16 conversations of 6 turns, each about a text of its own, and 8 images with 10 questions
  each. The KV pool of one engine cannot hold them all, and the pools of both together can. The
  model is random and has layers of 14 M parameters, so that a prompt costs something.
- one beginning: bursts of 64 questions about one long text, to the demo model
- frozen: one of the two engines stops as 24 requests arrive

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

from ops.bench.models import write_random_qwen2vl
from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.protocol.records import Finish, Usage
from shared.protocol.requests import GenerateRequest, ImagePart, ImageURL, Message, TextPart
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs
from workers.cli import settings
from workers.cli.ask import data_url
from workers.cli.local_cluster import LocalCluster
from workers.roles import default_workers

MODEL = "bench"
NUM_CHATS, NUM_TURNS = 16, 6
NUM_IMAGES, NUM_QUESTIONS = 8, 10
BEGIN_WORDS, TURN_WORDS, ANSWER_WORDS = 200, 8, 8
START_S, AT_ONCE = 6.0, 6
NUM_BURSTS = 5
ACK_WAIT_S = 4.0
SAMPLING = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
BLOCK_TOKENS, NUM_BLOCKS = 8, 1700
"""KV pool of an engine: two thirds of what the chats and images need."""
CHAT_SEQS, HOT_SEQS = 16, 8
"""Sequences in one batch. Chats leave room, and requests with one beginning are more than fit."""


@dataclass(frozen=True, slots=True)
class Setup:
    name: str
    engines: int
    slots: int
    blocks: int


SETUPS = (
    Setup("one queue", 2, 1, NUM_BLOCKS),
    Setup("16 slots", 2, 16, NUM_BLOCKS),
    Setup("one engine", 1, 1, 2 * NUM_BLOCKS),
)


@dataclass(slots=True)
class Answer:
    session: int
    turn: int
    worker: str
    took_s: float
    usage: Usage


@dataclass(slots=True)
class Site:
    bus: Bus
    cluster: LocalCluster

    async def ask(self, messages: list[Message], session: int = 0, turn: int = 0) -> Answer:
        began_s = time.perf_counter()
        request = GenerateRequest(MODEL, messages, SAMPLING)
        last = [record async for record in ask(self.bus, request, new_request_id())][-1]
        if not isinstance(last, Finish):
            raise SystemExit(f"a request has failed: {last}")
        took_s = time.perf_counter() - began_s
        return Answer(session, turn, last.path[-1].worker, took_s, last.usage)


@contextlib.asynccontextmanager
async def site(folder: Path, path: Path, setup: Setup, max_num_seqs: int) -> AsyncIterator[Site]:
    file = folder / "pagemill.yaml"
    model = {
        "path": str(path),
        "max_model_len": 2048,
        "slots": setup.slots,
        "stages": {"engine": {"replicas": setup.engines}},
    }
    tree = {
        "models": {MODEL: model},
        "nats": {"port": 0, "store_dir": str(folder / "nats")},
        "delivery": {"ack_wait_s": ACK_WAIT_S},
        "engine": {
            "block_size": BLOCK_TOKENS,
            "num_blocks": setup.blocks,
            "max_num_seqs": max_num_seqs,
            "threads": 1,
        },
    }
    file.write_bytes(msgspec.json.encode(tree))
    config = settings.load_config(file)
    cluster = LocalCluster(config, file, default_workers(config), log_file=folder / "workers.log")
    try:
        await cluster.start()
        bus = await Bus.connect(cluster.url, "bench")
        await asyncio.sleep(2.5)  # Heartbeats have made the owners known.
        yield Site(bus, cluster)
        await bus.close()
    finally:
        await cluster.stop()


# -- the loads ------------------------------------------------------------------------------------


def words(rng: random.Random, number: int) -> str:
    return " ".join(str(rng.randrange(100, 1000)) for _ in range(number))


async def chats(site: Site, rng: random.Random) -> list[Answer]:
    """Return all answers. Chats begin within START_S, and the turns of one follow each other."""
    credit = asyncio.Semaphore(AT_ONCE)
    answers: list[Answer] = []

    async def one(messages: list[Message], session: int, turn: int) -> None:
        async with credit:
            answers.append(await site.ask(messages, session, turn))

    async def chat(session: int, messages: list[Message]) -> None:
        await asyncio.sleep(START_S * rng.random())
        for turn in range(NUM_TURNS):
            messages = [*messages, Message("user", words(rng, TURN_WORDS))]
            await one(messages, session, turn)
            # The answers of a random model are noise, which does not become the same tokens again.
            messages = [*messages, Message("assistant", words(rng, ANSWER_WORDS))]

    async def questions(session: int, image: Path) -> None:
        await asyncio.sleep(START_S * rng.random())
        url = ImageURL(data_url(image))
        for turn in range(NUM_QUESTIONS):
            question = Message("user", [ImagePart(url), TextPart(words(rng, 4))])
            await one([question], session, turn)

    images = sorted(path for path in IMAGES.iterdir() if path.suffix in (".png", ".jpg"))
    begin = [Message("system", words(rng, BEGIN_WORDS)) for _ in range(NUM_CHATS)]
    await gather(
        [
            *(chat(number, [message]) for number, message in enumerate(begin)),
            *(questions(NUM_CHATS + n, image) for n, image in enumerate(images[:NUM_IMAGES])),
        ]
    )
    return answers


async def one_beginning(site: Site, rng: random.Random) -> list[Answer]:
    text = words(rng, 60)
    return await gather(site.ask([Message("user", f"{text} {words(rng, 2)}")]) for _ in range(64))


async def frozen(site: Site, rng: random.Random) -> float:
    """Return the time to the last answer, with an engine that stops as the first ones begin."""
    pid = site.cluster.pids("engine")[0]
    asked = asyncio.gather(*(site.ask([Message("user", words(rng, 40))]) for _ in range(24)))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGSTOP)
    began_s = time.perf_counter()
    try:
        await asked
        return time.perf_counter() - began_s
    finally:
        os.kill(pid, signal.SIGCONT)


async def gather(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*work))


# -- the report ------------------------------------------------------------------------------------

Figures = dict[str, float]


async def measure_chats(model: Path, setup: Setup, seed: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        async with site(Path(folder), model, setup, CHAT_SEQS) as running:
            began_s = time.perf_counter()
            answers = await chats(running, random.Random(seed))
            chats_s = time.perf_counter() - began_s
    took_s = sorted(answer.took_s for answer in answers)
    tokens: dict[int, int] = {}
    for answer in answers:
        tokens[answer.session] = max(answer.usage.prompt_tokens, tokens.get(answer.session, 0))
    return {
        "pool / working set": BLOCK_TOKENS * setup.blocks / sum(tokens.values()),
        "hit rate": sum(a.usage.cached_tokens for a in answers)
        / sum(a.usage.prompt_tokens for a in answers),
        "answer p50 s": median(took_s),
        "answer p99 s": took_s[int(0.99 * len(took_s))],
        "all answers s": chats_s,
    }


async def measure_hot(setup: Setup, seed: int) -> Figures:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        async with site(Path(folder), settings.DEMO_MODEL, setup, HOT_SEQS) as running:
            shares, times_s = [], []
            for _ in range(NUM_BURSTS):
                began_s = time.perf_counter()
                hot = Counter(answer.worker for answer in await one_beginning(running, rng))
                times_s.append(time.perf_counter() - began_s)
                shares.append(max(hot.values()) / hot.total())
            return {
                "one beginning: share": median(shares),
                "one beginning s": median(times_s),
                "frozen s": await frozen(running, rng),
            }


async def main(rounds: int) -> None:
    logs.configure_logging("error", role="bench")
    found: dict[str, list[Figures]] = {setup.name: [] for setup in SETUPS}
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        write_random_qwen2vl(Path(folder), settings.DEMO_MODEL)
        for seed in range(rounds):
            for setup in SETUPS:
                figures = await measure_chats(Path(folder), setup, seed)
                if setup.engines > 1:
                    figures |= await measure_hot(setup, seed)
                found[setup.name].append(figures)
    sys.stdout.write(f"{'':<20}" + "".join(f"{name:>12}" for name in found) + "\n")
    for name in found[SETUPS[0].name][0]:
        cells = [
            f"{median(one[name] for one in some):12.3f}" if name in some[0] else f"{'-':>12}"
            for some in found.values()
        ]
        sys.stdout.write(f"{name:<20}" + "".join(cells) + "\n")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
