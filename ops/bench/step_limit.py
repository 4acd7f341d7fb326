"""Measure the curve of `engine.max_step_ms`: tokens a second and gaps against first tokens.

64 requests of mixed lengths arrive at random times over HTTP, as in `ops.bench.heldout`, once a
round for each setting; all settings get the same requests, and the order of the settings turns with
each round. Each setting has a cluster of its own in each round, so 1 to 2 minutes a line and round.
The first row is the default, without a limit; `min_prompt_share` is varied at one limit.

    python -m ops.bench.step_limit [--model FOLDER] [--rounds 2] [--limits 50 100 200 400]
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median, quantiles

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from ops.bench.gateway.cluster import local_gateway
from ops.bench.gateway.report import p99
from ops.bench.gateway.transports import OverHttp
from ops.bench.heldout import workloads
from ops.bench.heldout.workloads import Arrival
from ops.bench.peers import machine
from ops.bench.peers.workloads import Maker
from shared.telemetry import logs
from workers.cli import settings

LIMITS_MS = (50.0, 100.0, 200.0, 400.0)
SHARES = (0.25, 0.75)
"""Shares beside the default, at the second limit."""
MAX_MODEL_LEN = 2048
NUM_WARM_UPS = 4

Setting = dict[str, float]
Figures = dict[str, float]


def settings_of(limits_ms: Sequence[float]) -> list[Setting]:
    """Return the settings that are measured, the default first."""
    varied = limits_ms[min(1, len(limits_ms) - 1)]
    by_share = [{"max_step_ms": varied, "min_prompt_share": share} for share in SHARES]
    return [{}, *({"max_step_ms": limit} for limit in limits_ms), *by_share]


def report(found: dict[str, list[Figures]]) -> Table:
    """Return the medians of the rounds, by setting."""
    table = Table("setting", *next(iter(found.values()))[0])
    for name, rounds in found.items():
        medians = (median(figures[key] for figures in rounds) for key in rounds[0])
        table.add_row(name, *(f"{value:,.1f}" for value in medians))
    return table


async def measure(model: Path, setting: Setting, seed: int) -> Figures:
    text = msgspec.json.decode((model / "config.json").read_bytes())
    text = text.get("text_config", text)
    max_model_len = min(MAX_MODEL_LEN, text["max_position_embeddings"])
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        async with local_gateway(model, Path(name), max_model_len, setting) as (cluster, _):
            assert cluster.gateway_url is not None
            server = OverHttp(cluster.gateway_url)
            # The limit follows from the times of steps, of which there are none at first.
            for number in (-1, seed):
                rng = random.Random(number)
                arrivals = workloads.poisson(Maker(rng, text["vocab_size"], Path(name)), rng)
                figures = await _run(server, arrivals[: None if number == seed else NUM_WARM_UPS])
    return figures


async def _run(server: OverHttp, arrivals: Sequence[Arrival]) -> Figures:
    async def arrive(arrival: Arrival) -> tuple[float, float]:
        await asyncio.sleep(arrival.after_s)
        times = await server(arrival.asked)
        return 1e3 * times.first_s, 1e3 * times.gap_s

    began_s = time.perf_counter()
    times = await asyncio.gather(*map(arrive, arrivals))
    took_s = time.perf_counter() - began_s
    first_ms, gap_ms = map(list, zip(*times, strict=True))
    return {
        "tokens/s": sum(each.asked.request.max_tokens for each in arrivals) / took_s,
        "first token p50, ms": median(first_ms),
        "p95": quantiles(first_ms, n=20, method="inclusive")[-1],
        "longest gap of a request p50, ms": median(gap_ms),
        "p99": p99(gap_ms),
    }


async def main(model: Path, rounds: int, limits_ms: Sequence[float]) -> Table:
    measured = settings_of(limits_ms)
    found: dict[str, list[Figures]] = defaultdict(list)
    for number in range(rounds):
        for setting in measured[number:] + measured[:number]:
            found[_name_of(setting)].append(await measure(model, setting, number))
    return report({_name_of(setting): found[_name_of(setting)] for setting in measured})


def _name_of(setting: Setting) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in setting.items()) or "no limit"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=settings.DEMO_MODEL)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limits", type=float, nargs="+", default=LIMITS_MS, help="in ms")
    given = parser.parse_args()
    logs.configure_logging("warning", role="bench")
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(f"{machine.cpu_model()}, {date.today().isoformat()}, {given.model.name}")
    with machine.alone():
        console.print(uvloop.run(main(given.model.absolute(), given.rounds, given.limits)))
