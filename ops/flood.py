"""`make flood`: measure how much longer a tenant waits for its answers while another one floods.

A tenant sends short texts at a steady rate to a `pagemill up` with the demo model. Between the
quiet phases, another tenant sends ten times as many requests: large images, grammars, big bodies
and long answers. The flood uses a key without limits, which is the default, and then a key with
`max_concurrent`. The figures are the steady tenant's p95 during each flood, divided by its p95 in
the quiet phases.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
import numpy as np
import uvloop
from PIL import Image

from ops.harness.deployment import demo_tree, deployment
from ops.harness.load import at_rate
from ops.harness.samples import Samples
from ops.harness.tables import console, print_table
from shared.telemetry import logs

MODEL, CHAT = "demo", "/v1/chat/completions"
STEADY, FLOODING, LIMITED = "steady", "flooding", "limited"
MAX_CONCURRENT = 2
"""Limit of the second key of the flooding tenant."""
FLOODS = {
    FLOODING: "during the flood",
    LIMITED: f"during the flood with {MAX_CONCURRENT} requests at one time",
}
GOAL = 1.5
TIMES = 10
SIDE = 1500
"""Pixels of each side of a large image."""
BIG_BODY = 4 * 2**20
PAUSE_S = 5.0
LEAD_S = 2.0
"""The flood is under way when the steady tenant's answers begin to count."""
KINDS = ("image", "grammar", "body", "long")


def _key(name: str) -> str:
    return f"pm-flood-{name}"


def config() -> dict[str, Any]:
    keys: list[dict[str, Any]] = [
        {
            "name": name,
            "sha256": hashlib.sha256(_key(name).encode()).hexdigest(),
            "tenant": STEADY if name == STEADY else FLOODING,
        }
        for name in (STEADY, FLOODING, LIMITED)
    ]
    keys[-1]["max_concurrent"] = MAX_CONCURRENT
    gateway = {"page": False, "api_keys": keys}
    return demo_tree(sampling_defaults={}) | {"gateway": gateway, "log_level": "warning"}


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


def _client(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=120,
        limits=httpx.Limits(max_connections=None),
        headers={"authorization": f"Bearer {_key(key)}", "content-type": "application/json"},
        trust_env=False,
    )


async def send_steadily(http: httpx.AsyncClient, rate: float, lasts_s: float) -> list[float]:
    """Send short texts; return the seconds of each answer."""
    took: list[float] = []

    async def one(number: int) -> None:
        began = time.monotonic()
        body = _body(f"what is number {number}?", 8, seed=number)
        answer = await http.post(CHAT, content=json.dumps(body))
        answer.raise_for_status()
        took.append(time.monotonic() - began)

    await at_rate(rate, one, lambda number: number >= rate * lasts_s)
    return took


class Flood:
    """The clients of the flooding tenant, in a separate process."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._images = _large_images(self._rng)
        self._big = json.dumps(_body("x " * (BIG_BODY // 2), 4)).encode()
        self._outcomes: Counter[str] = Counter()

    async def send(self, url: str, key: str, rate: float, lasts_s: float) -> Counter[str]:
        """Send requests of all kinds in turn; return the number of each outcome."""
        async with _client(url, key) as http:

            async def one(number: int) -> None:
                kind = KINDS[number % len(KINDS)]
                try:
                    answer = await http.post(CHAT, content=self._content(kind))
                    self._outcomes[f"{kind} {answer.status_code}"] += 1
                except httpx.HTTPError as error:
                    self._outcomes[f"{kind} {type(error).__name__}"] += 1

            await at_rate(rate, one, lambda number: number >= rate * lasts_s)
        return self._outcomes

    def _content(self, kind: str) -> bytes:
        unique = str(self._rng.randrange(2**60))
        if kind == "body":
            return self._big
        if kind == "image":
            # Bytes after the end of an image make a new file of it.
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


def run_flood(url: str, key: str, rate: float, lasts_s: float) -> Counter[str]:
    """Flood a gateway. Another process runs this function."""
    return uvloop.run(Flood().send(url, key, rate, lasts_s))


def come_first() -> bool:
    """Let this process run whenever it can, and return whether Linux permits it.

    It stands for a client on another machine, which does not wait for these processors.
    """
    try:
        # Child processes keep the usual priority.
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))
    except PermissionError:
        return False
    return True


async def _measure(
    rate: float, phase_s: float, rounds: int
) -> tuple[dict[str, Samples], dict[str, Counter[str]]]:
    """Return the times of the steady tenant's answers, alone and during the flood of each key.

    The second value has the outcomes of the flood's requests.
    """
    took = {key: Samples() for key in ("", *FLOODS)}
    outcomes: dict[str, Counter[str]] = {key: Counter() for key in FLOODS}
    async with deployment(config()) as site:
        if not come_first():
            console.print("not root: times include the client's waits for a processor")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            loop = asyncio.get_running_loop()
            warm_up = (site.http, FLOODING, 1.0, 1.0)
            await loop.run_in_executor(process, run_flood, *warm_up)
            async with _client(site.http, STEADY) as http:
                await send_steadily(http, rate, PAUSE_S)
                for _ in range(rounds):
                    took[""] += await send_steadily(http, rate, phase_s)
                    for key in FLOODS:
                        flooding = (site.http, key, TIMES * rate, phase_s + LEAD_S)
                        flood = loop.run_in_executor(process, run_flood, *flooding)
                        await asyncio.sleep(LEAD_S)
                        took[key] += await send_steadily(http, rate, phase_s)
                        outcomes[key] += await flood
                        await asyncio.sleep(PAUSE_S)
    return took, outcomes


def _show(took: dict[str, Samples], outcomes: dict[str, Counter[str]]) -> None:
    rows = [
        (
            FLOODS.get(key, "alone"),
            len(times),
            *(f"{1000 * s:.0f} ms" for s in (times.median, times.p95, max(times))),
            f"{times.p95 / took[''].p95:.2f}",
        )
        for key, times in took.items()
    ]
    columns = ("tenant", "answers", "p50", "p95", "max", f"ratio of p95, goal {GOAL}")
    print_table("answers of the steady tenant", columns, rows)
    for key, counted in outcomes.items():
        console.print(f"{FLOODS[key]}: {dict(sorted(counted.items()))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=2.0, help="steady requests a second")
    parser.add_argument("--phase", type=float, default=20.0, help="seconds of a phase")
    parser.add_argument("--rounds", type=int, default=2, help="phases of each kind")
    options = parser.parse_args()
    logs.configure_logging("error", role="flood")
    _show(*uvloop.run(_measure(options.rate, options.phase, options.rounds)))


if __name__ == "__main__":
    main()
