"""Measure the start of an engine worker: from its process to its readiness and to a first token.

    python -m ops.bench.start MODEL [--rounds 5]

The broker, a coordinator and a renderer run, and a request waits. Goals: an engine with
SmolLM2-135M, whose kernels are compiled, is ready within 4 s, and has written a token within 5 s.
The time of an import of its modules alone is measured beside it, in processes of their own.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.client import ask, new_request_id
from shared.protocol.records import TokenChunk
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams

NAME = "model"
LIMIT_S = 120.0
READY, TOKEN, IMPORT = "ready", "first token", "import of its modules"
GOALS = {READY: 4.0, TOKEN: 5.0}
# Containers have bytecode of all that they import; a shell may have forbidden to write it.
ENVIRONMENT = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=lambda path: Path(path).absolute())
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedServer(Path(folder) / "nats")
        broker.start()
        try:
            found = asyncio.run(measure(broker.url, Path(folder), given.model, given.rounds))
        finally:
            broker.stop()
    table = Table("seconds", "median", "of each start", "goal")
    for part, seconds in found.items():
        goal = GOALS.get(part)
        each = ", ".join(f"{s:.2f}" for s in seconds)
        table.add_row(part, f"{statistics.median(seconds):.2f}", each, f"{goal:g}" if goal else "")
    Console().print(table)


async def measure(url: str, folder: Path, model: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each start; the first one, which may write bytecode, is left out."""
    config = folder / "pagemill.yaml"
    one = {"path": str(model), "dtype": "bfloat16", "max_model_len": 1024}
    settings = {"models": {NAME: one}, "nats": {"unchecked": True}, "metrics": {"port": 0}}
    config.write_text(json.dumps(settings))
    bus = await Bus.connect(url, "bench-start")
    others = [start(role, config, url) for role in ("coordinator", "renderer")]
    found: dict[str, list[float]] = {READY: [], TOKEN: [], IMPORT: []}
    try:
        for other in others:
            await until_ready(bus, other)
        for round_ in range(rounds + 1):
            ready_s, token_s = await measure_start(bus, config, url)
            import_s = await asyncio.to_thread(measure_import)
            if round_:
                for part, seconds in zip(found, (ready_s, token_s, import_s), strict=True):
                    found[part].append(seconds)
    finally:
        for other in others:
            other.terminate()
            other.wait()
        await bus.close()
    return found


async def measure_start(bus: Bus, config: Path, url: str) -> tuple[float, float]:
    """Start an engine, and return the seconds until it is ready and until a first token."""
    began = time.perf_counter()
    engine = start("engine", config, url)
    try:
        first = asyncio.create_task(first_token(bus))
        async with asyncio.timeout(LIMIT_S):
            await until_ready(bus, engine)
            ready = time.perf_counter()
            return ready - began, await first - began
    finally:
        engine.terminate()
        engine.wait()


def start(role: str, config: Path, url: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "workers", "worker", role, "--config", str(config)]
    return subprocess.Popen([*command, "--nats", url], stderr=subprocess.DEVNULL, env=ENVIRONMENT)


async def until_ready(bus: Bus, worker: "subprocess.Popen[bytes]") -> None:
    while worker.pid not in {beat.pid for beat in await bus.read_heartbeats()}:
        if worker.poll() is not None:
            raise SystemExit(f"a worker has ended with exit code {worker.returncode}")
        await asyncio.sleep(0.02)


async def first_token(bus: Bus) -> float:
    """Return when a request has its first token, as a time of the performance counter."""
    sampling = SamplingParams(temperature=0, max_tokens=4)
    request = GenerateRequest(NAME, [Message("user", "Who are you?")], sampling)
    async for record in ask(bus, request, new_request_id()):
        if isinstance(record, TokenChunk):
            return time.perf_counter()
    raise SystemExit("the request has ended without a token")


def measure_import() -> float:
    code = "from workers.cli.commands.worker import load_main; load_main('engine')"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
