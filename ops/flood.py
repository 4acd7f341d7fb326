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
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
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


class Tenants:
    """The clients of both tenants."""

    def __init__(self, url: str, kinds: tuple[str, ...]) -> None:
        self._http = {
            tenant: httpx.AsyncClient(
                base_url=url,
                timeout=120,
                limits=httpx.Limits(max_connections=None),
                headers={"authorization": f"Bearer {_key(tenant)}"},
                trust_env=False,
            )
            for tenant in (STEADY, FLOODING)
        }
        self._rng = random.Random(1)
        self._images = _large_images(self._rng)
        self._kinds = kinds
        self.flood: Counter[str] = Counter()

    async def close(self) -> None:
        for client in self._http.values():
            await client.aclose()

    async def steady(self, rate: float, lasts_s: float) -> list[float]:
        """Send short texts; return how long each answer took."""
        took: list[float] = []

        async def one(number: int) -> None:
            began = time.monotonic()
            body = _body(f"what is number {number}?", 8, seed=number)
            answer = await self._http[STEADY].post(CHAT, json=body)
            answer.raise_for_status()
            took.append(time.monotonic() - began)

        await _at_rate(rate, lasts_s, one, MAX_OPEN)
        return took

    async def flooding(self, rate: float, lasts_s: float) -> None:
        async def one(number: int) -> None:
            kind = self._kinds[number % len(self._kinds)]
            body = self._flood_body(kind)
            try:
                answer = await self._http[FLOODING].post(CHAT, json=body)
                self.flood[f"{kind} {answer.status_code}"] += 1
            except httpx.HTTPError as error:
                self.flood[f"{kind} {type(error).__name__}"] += 1

        await _at_rate(rate, lasts_s, one, MAX_OPEN)

    def _flood_body(self, kind: str) -> dict[str, Any]:
        unique = str(self._rng.randrange(2**60))
        if kind == "image":
            # Bytes behind the end of an image make another file of it.
            data = base64.b64encode(self._rng.choice(self._images) + unique.encode()).decode()
            url = {"url": f"data:image/jpeg;base64,{data}"}
            parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": unique}]
            return _body(parts, 16)
        if kind == "grammar":
            fields = {f"f{unique}{i}": {"type": "string", "maxLength": 40} for i in range(20)}
            schema = {"type": "object", "properties": fields, "required": list(fields)}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            return _body(unique, 64, response_format=form)
        if kind == "body":
            return _body("x " * (BIG_BODY // 2), 4)
        return _body(unique, 200, ignore_eos=True)


async def _at_rate(rate: float, lasts_s: float, one: Any, max_open: int) -> None:
    """Start a call of `one` at each tick, while fewer than `max_open` run; wait for all."""
    began, running = time.monotonic(), set[asyncio.Task[None]]()
    for number in range(round(rate * lasts_s)):
        await asyncio.sleep(began + number / rate - time.monotonic())
        if len(running) < max_open:
            task = asyncio.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)
    await asyncio.gather(*running)


def p95(took: list[float]) -> float:
    return statistics.quantiles(took, n=20)[-1]


async def _measure(url: str, rate: float, phase_s: float, rounds: int, kinds: Any) -> float:
    tenants = Tenants(url, kinds)
    await tenants.steady(rate, 5.0)
    quiet: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        quiet += await tenants.steady(rate, phase_s)
        flood = asyncio.create_task(tenants.flooding(TIMES * rate, phase_s + 2))
        await asyncio.sleep(1.0)
        beside += await tenants.steady(rate, phase_s)
        await flood
        await asyncio.sleep(PAUSE_S)
    await tenants.close()
    table = Table("the steady tenant", "answers", "p50", "p95", "max")
    for name, took in (("alone", quiet), ("beside the flood", beside)):
        cells = (statistics.median(took), p95(took), max(took))
        table.add_row(name, str(len(took)), *(f"{1000 * cell:.0f} ms" for cell in cells))
    console.print(table)
    console.print(f"the flood: {dict(sorted(tenants.flood.items()))}")
    ratio = p95(beside) / p95(quiet)
    console.print(f"ratio of p95: {ratio:.2f} (goal {GOAL})")
    return ratio


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
