"""`make flood`: how much longer one tenant waits for its answers while another one floods.

A tenant sends short texts at a steady rate to a `pagemill up` with the demo model. In every second
phase another tenant sends ten times as many requests: large images, grammars, big bodies and long
answers. The figure is the tenant's p95 in these phases, divided by that of the quiet ones.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from PIL import Image
from rich.console import Console
from rich.table import Table

from ops.bench.servers import serving
from shared.bus.embedded_server import free_port
from shared.telemetry import logs

OPS = Path(__file__).parent
MODEL, CHAT = "demo", "/v1/chat/completions"
STEADY, FLOODING = "steady", "flooding"
GOAL = 1.5
TIMES = 10
SIDE = 1500
"""Pixels of each side of a large image."""
BIG_BODY = 4 * 2**20
MAX_OPEN = 400
PAUSE_S = 5.0
LEAD_S = 2.0
"""The flood is under way when the steady tenant's answers begin to count."""
KINDS = ("image", "grammar", "body", "long")
console = Console()


def _key(tenant: str) -> str:
    return f"pm-flood-{tenant}"


def config(port: int, max_concurrent: int | None) -> dict[str, Any]:
    keys = [
        {
            "name": tenant,
            "sha256": hashlib.sha256(_key(tenant).encode()).hexdigest(),
            "max_concurrent": max_concurrent,
        }
        for tenant in (STEADY, FLOODING)
    ]
    return {
        "models": {MODEL: {"path": str(OPS / "demo_model"), "max_model_len": 1024}},
        "nats": {"port": port, "store_dir": "nats"},
        "gateway": {"port": 0, "page": False, "api_keys": keys},
        "log_level": "warning",
    }


def _body(content: object, max_tokens: int, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **more}


def _large_images(rng: random.Random) -> list[bytes]:
    """Images of noise, which compress badly."""
    files = []
    for _ in range(4):
        pixels = np.frombuffer(rng.randbytes(SIDE * SIDE * 3), np.uint8).reshape(SIDE, SIDE, 3)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=60)
        files.append(file.getvalue())
    return files


def _client(url: str, tenant: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=120,
        limits=httpx.Limits(max_connections=None),
        headers={"authorization": f"Bearer {_key(tenant)}", "content-type": "application/json"},
        trust_env=False,
    )


async def send_steadily(http: httpx.AsyncClient, rate: float, lasts_s: float) -> list[float]:
    """Send short texts; return how long each answer took."""
    took: list[float] = []

    async def one(number: int) -> None:
        began = time.monotonic()
        body = _body(f"what is number {number}?", 8, seed=number)
        answer = await http.post(CHAT, content=json.dumps(body))
        answer.raise_for_status()
        took.append(time.monotonic() - began)

    await _at_rate(rate, lasts_s, one)
    return took


class Flood:
    """The clients of the flooding tenant, in a process of their own."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds
        self._rng = random.Random(1)
        self._images = _large_images(self._rng)
        self._big = json.dumps(_body("x " * (BIG_BODY // 2), 4)).encode()
        self._outcomes: Counter[str] = Counter()

    async def send(self, url: str, rate: float, lasts_s: float) -> Counter[str]:
        """Send requests of all kinds in turn; return how many ended in which way."""
        async with _client(url, FLOODING) as http:

            async def one(number: int) -> None:
                kind = self._kinds[number % len(self._kinds)]
                try:
                    answer = await http.post(CHAT, content=self._content(kind))
                    self._outcomes[f"{kind} {answer.status_code}"] += 1
                except httpx.HTTPError as error:
                    self._outcomes[f"{kind} {type(error).__name__}"] += 1

            await _at_rate(rate, lasts_s, one)
        return self._outcomes

    def _content(self, kind: str) -> bytes:
        unique = str(self._rng.randrange(2**60))
        if kind == "body":
            return self._big
        if kind == "image":
            # Bytes behind the end of an image make another file of it.
            data = base64.b64encode(self._rng.choice(self._images) + unique.encode()).decode()
            url = {"url": f"data:image/jpeg;base64,{data}"}
            parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": unique}]
            return json.dumps(_body(parts, 16)).encode()
        if kind == "grammar":
            fields = {f"f{unique}{i}": {"type": "string", "maxLength": 40} for i in range(20)}
            schema = {"type": "object", "properties": fields, "required": list(fields)}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            return json.dumps(_body(unique, 64, response_format=form)).encode()
        return json.dumps(_body(unique, 200, ignore_eos=True)).encode()


def run_flood(url: str, kinds: Sequence[str], rate: float, lasts_s: float) -> Counter[str]:
    """Flood a gateway; this is the work of another process."""
    return uvloop.run(Flood(kinds).send(url, rate, lasts_s))


async def _at_rate(rate: float, lasts_s: float, one: Callable[[int], Awaitable[None]]) -> None:
    """Start a call of `one` at each tick, while fewer than `MAX_OPEN` run; wait for all."""
    began, running = time.monotonic(), set[asyncio.Future[None]]()
    for number in range(round(rate * lasts_s)):
        await asyncio.sleep(began + number / rate - time.monotonic())
        if len(running) < MAX_OPEN:
            task = asyncio.ensure_future(one(number))
            running.add(task)
            task.add_done_callback(running.discard)
    await asyncio.gather(*running)


def p95(took: list[float]) -> float:
    return statistics.quantiles(took, n=20)[-1]


async def _measure(
    url: str, rate: float, phase_s: float, rounds: int, kinds: Sequence[str]
) -> None:
    """Print what the steady tenant's answers take, alone and beside the flood."""
    quiet: list[float] = []
    beside: list[float] = []
    outcomes: Counter[str] = Counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(process, run_flood, url, kinds, 1.0, 1.0)
        async with _client(url, STEADY) as http:
            await send_steadily(http, rate, PAUSE_S)
            for _ in range(rounds):
                quiet += await send_steadily(http, rate, phase_s)
                flooding = (url, kinds, TIMES * rate, phase_s + LEAD_S)
                flood = loop.run_in_executor(process, run_flood, *flooding)
                await asyncio.sleep(LEAD_S)
                beside += await send_steadily(http, rate, phase_s)
                outcomes += await flood
                await asyncio.sleep(PAUSE_S)
    table = Table("the steady tenant", "answers", "p50", "p95", "max")
    for name, took in (("alone", quiet), ("beside the flood", beside)):
        cells = (statistics.median(took), p95(took), max(took))
        table.add_row(name, str(len(took)), *(f"{1000 * cell:.0f} ms" for cell in cells))
    console.print(table)
    console.print(f"the flood: {dict(sorted(outcomes.items()))}")
    console.print(f"ratio of p95: {p95(beside) / p95(quiet):.2f} (goal {GOAL})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, of one tenant")
    parser.add_argument("--phase", type=float, default=20.0, help="seconds of a phase")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these requests")
    parser.add_argument("--max-concurrent", type=int, help="limit of each key, in the gateway")
    asked = parser.parse_args()
    logs.configure_logging("error", role="flood")
    kinds = tuple(asked.kind or KINDS)
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-flood-") as name,
        serving(Path(name), config(free_port(), asked.max_concurrent)) as url,
    ):
        uvloop.run(_measure(url, asked.rate, asked.phase, asked.rounds, kinds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
