"""Measure a cold start: from a request for pools at zero to its first token, and where it goes.

`python -m ops.bench.cold_start [ROUNDS]` runs `pagemill up` with the demo model, whose engines and
encoders are at zero, and asks one question a round. Half of the questions have an image.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.state import scale_state
from workers.cli.ask import build_request
from workers.cli.settings import DEMO_MODEL

CONFIG = f"""
models:
  demo: {{path: {DEMO_MODEL}, tower: encoder, max_model_len: 1024}}
embeddings: {{ttl_s: 2.0}}
scale:
  pools:
  - {{role: engine, idle_s: 2}}
  - {{role: encoder, idle_s: 2}}
"""
ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
PARTS = ("decided", "forked", "engine ready", "engine began", "first token")


async def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pagemill.yaml").write_text(CONFIG)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = _start(folder, port)
        try:
            await _measure(folder, f"nats://127.0.0.1:{port}", rounds)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    env = os.environ | {"PAGEMILL_NATS__PORT": str(port), "PAGEMILL_GATEWAY__PORT": "0"}
    said = folder / "up.err"
    with said.open("wb") as stderr:
        command = [sys.executable, "-m", "workers", "up"]
        env["PYTHONPATH"] = str(ROOT)
        process = subprocess.Popen(command, cwd=folder, env=env, stderr=stderr)
    deadline = time.monotonic() + LIMIT_S
    while b"ready at" not in said.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(said.read_text())
        time.sleep(0.1)
    return process


async def _measure(folder: Path, url: str, rounds: int) -> None:
    bus = await Bus.connect(url, "cold-start")
    try:
        await _ask(bus, 0)  # The process that workers are forked from may still import.
        found: list[dict[str, float]] = []
        for number in range(rounds):
            await _wait_for_zero(bus)
            asked_ms, first_ms = await _ask(bus, number)
            found.append(_parts(folder, asked_ms, first_ms))
            _print(" ".join(f"{name} {found[-1][name]:.2f} s;" for name in PARTS).rstrip(";"))
        _print("medians, since the request was sent:")
        for name in PARTS:
            _print(f"  {name:<14} {median(one[name] for one in found):.2f} s")
    finally:
        await bus.close()


async def _ask(bus: Bus, number: int) -> tuple[float, float]:
    """Ask one question; return when it was sent, and when its first record came."""
    images = [IMAGES / "red.png"] if number % 2 else []
    request = build_request("demo", "What can you do?", images, {})
    asked_ms, first_ms = bus.now_ms(), 0.0
    async for _ in ask(bus, request, new_request_id()):
        first_ms = first_ms or bus.now_ms()
    return asked_ms, first_ms


async def _wait_for_zero(bus: Bus) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            report = await scale_state.read_report(bus)
            plan = await scale_state.read_current_plan(bus)
            wanted = 1 if plan is None else sum(pool.wanted for pool in plan.pools.values())
            if report and not wanted and not any(report.pools.values()):
                break
            await asyncio.sleep(0.2)
    # The leader listens from the look on that has found no worker.
    await asyncio.sleep(2.0)


def _parts(folder: Path, asked_ms: float, first_ms: float) -> dict[str, float]:
    """Return the seconds from the request to each event; the log has the rest of them."""
    log = (folder / "data" / "pagemill.log").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in log]
    at_ms = [1000 * datetime.fromisoformat(event["timestamp"]).timestamp() for event in events]
    since = [(ms, event) for ms, event in zip(at_ms, events, strict=True) if ms >= asked_ms]

    def first(name: str, **fields: str) -> float:
        wanted = {"event": name, **fields}.items()
        return next((ms - asked_ms) / 1000 for ms, event in since if wanted <= event.items())

    return {
        "decided": first("scale", pool="engine/demo"),
        "forked": first("pool_changed", pool="engine/demo"),
        "engine ready": first("ready", role="engine"),
        "engine began": first("began", role="engine"),
        "first token": (first_ms - asked_ms) / 1000,
    }


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 6))
