"""`make leaks`: check that no process has more memory after a flood of requests.

Texts and images, streamed and whole, cancelled in the middle and refused, go through the gateway of
a `pagemill up` with the demo model. The first requests fill caches, which have small limits here.
The memory of an idle role after these is its plateau. After all others it may have 5 % more.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvloop

from ops.harness.deployment import demo_tree, deployment
from ops.harness.tables import console, print_table
from shared.telemetry import logs

OPS = Path(__file__).parent
MODEL = "demo"
PLATEAU = 2000
MAX_GROWTH = 0.05
CONCURRENCY = 24
# Memory is stable when two samples so far apart differ by less than this.
SAMPLE_S, STABLE = 3.0, 0.002
MAX_IDLE_S = 90.0
WORDS = ["red", "green", "blue", "circle", "square", "star", "how", "many", "what", "which"]
NUM_FILES = 200
CHAT = "/v1/chat/completions"


# Caches that the first requests fill.
TREE = demo_tree(sampling_defaults={}) | {
    "gateway": {"page": False},
    "engine": {"kv_cache_mib": 32, "embedding_cache_mib": 4, "threads": 1},
    "renderer": {"url_cache_mib": 4},
    "blobs": {"arena_mib": 16},
    "log_level": "warning",
}


class Clients:
    """Clients of a gateway, which send one request after the other."""

    def __init__(self, url: str, seed: int) -> None:
        limits = httpx.Limits(max_connections=CONCURRENCY)
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False)
        self._seed = seed
        self._next = 0
        self.outcomes: Counter[str] = Counter()
        images = sorted((OPS / "demo_images").glob("*.png"))
        self._images = [image.read_bytes() for image in images]
        self._kinds: dict[Callable[[random.Random], Awaitable[int]], float] = {
            self._stream: 4,
            self._whole: 2,
            self._image: 2,
            self._cancel: 1,
            self._refused: 1,
        }

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, last: int) -> None:
        """Send the requests before number `last` that have not been sent."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(self._run(last))

    async def _run(self, last: int) -> None:
        while self._next < last:
            rng = random.Random(f"{self._seed}:{self._next}")
            self._next += 1
            send = rng.choices([*self._kinds], [*self._kinds.values()])[0]
            status = await send(rng)
            self.outcomes[f"{send.__name__.strip('_')} {status}"] += 1

    async def _stream(self, rng: random.Random) -> int:
        body = _body(_words(rng), rng.randint(1, 12), stream=True)
        async with self._http.stream("POST", CHAT, json=body) as answer:
            async for _ in answer.aiter_raw():
                pass
        return answer.status_code

    async def _whole(self, rng: random.Random) -> int:
        body = _body(_words(rng), rng.randint(1, 12), n=rng.choice([1, 1, 2]))
        return (await self._http.post(CHAT, json=body)).status_code

    async def _image(self, rng: random.Random) -> int:
        # Bytes after the end of an image make a new file of it.
        data = rng.choice(self._images) + str(rng.randrange(NUM_FILES)).encode()
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": _words(rng)},
        ]
        return (await self._http.post(CHAT, json=_body(content, 4))).status_code

    async def _cancel(self, rng: random.Random) -> int:
        body = _body(_words(rng), 400, stream=True, ignore_eos=True)
        async with self._http.stream("POST", CHAT, json=body) as answer:
            async for _ in answer.aiter_raw():
                break
        return answer.status_code

    async def _refused(self, rng: random.Random) -> int:
        image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        body = rng.choice(
            [
                _body("?", 4) | {"model": f"none-{rng.random()}"},
                _body("?", 4, temperature=-1),
                _body(image, 4),
                {"model": MODEL, "messages": "?"},
                _body("? " * 4000, 4),
            ]
        )
        return (await self._http.post(CHAT, json=body)).status_code


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.choice([3, 10, 60])))


def _body(content: object, max_tokens: int, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **more}


class Memory:
    """The memory of all workers, by role, and of the broker."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.peaks: dict[str, float] = {}

    def sample(self) -> dict[str, float]:
        sample = {role: sum(map(_own_mib, _with_children(pid))) for role, pid in self._pids.items()}
        for role, mib in sample.items():
            self.peaks[role] = max(mib, self.peaks.get(role, 0.0))
        return sample

    async def watch(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    async def when_idle(self) -> dict[str, float]:
        """Wait until memory is stable, and return the last sample."""
        deadline, last = time.monotonic() + MAX_IDLE_S, self.sample()
        while time.monotonic() < deadline:
            await asyncio.sleep(SAMPLE_S)
            before, last = last, self.sample()
            if all(abs(last[role] - before[role]) <= STABLE * before[role] for role in last):
                break
        return last


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _with_children(int(child))


def _own_mib(pid: int) -> float:
    """Return the proportional set size without shared memory: arenas have a fixed size, and become
    resident as slots of them are used first."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0.0
    kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return (kib["Pss"] - kib["Pss_Shmem"]) / 1024


async def _measure(num_requests: int, seed: int) -> bool:
    """Flood a gateway; return whether each role is back at its plateau."""
    async with deployment(TREE) as site:
        memory, clients = Memory(site.processes()), Clients(site.http, seed)
        start = memory.sample()
        await clients.run(PLATEAU)
        plateau = await memory.when_idle()
        watching = asyncio.create_task(memory.watch())
        began = time.monotonic()
        await clients.run(num_requests)
        took_s = time.monotonic() - began
        watching.cancel()
        end = await memory.when_idle()
        await clients.close()
    rate = (num_requests - PLATEAU) / took_s
    console.print(f"{num_requests} requests, {rate:.0f} a second; {json.dumps(clients.outcomes)}")
    growth = {role: mib / plateau[role] - 1 for role, mib in end.items()}
    rows = [
        (
            role,
            *(f"{m:.1f} MiB" for m in (start[role], plateau[role], memory.peaks[role], mib)),
            f"{100 * growth[role]:+.1f} %",
        )
        for role, mib in end.items()
    ]
    columns = ("role", "at first", "plateau", "most", "at rest", "growth")
    print_table(f"memory of {num_requests} requests", columns, rows)
    # The broker has an index of all logs, which stay for `token_log_age_s`.
    leaking = [role for role in growth if growth[role] > MAX_GROWTH and role != "broker"]
    console.print(f"leaking: {', '.join(leaking)}" if leaking else "all roles are at their plateau")
    return not leaking


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests")
    options = parser.parse_args()
    logs.configure_logging("error", role="leaks")
    return 0 if uvloop.run(_measure(options.requests, options.seed)) else 1


if __name__ == "__main__":
    sys.exit(main())
