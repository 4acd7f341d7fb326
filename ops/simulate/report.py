"""The tables and the chart of docs/contribute/scaling.md."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ops.simulate.autoscaling import Keda, OwnPolicy
from ops.simulate.chart import line_chart
from ops.simulate.loads import LOADS, bursty_chat
from ops.simulate.routers import SharedQueue, Slots
from ops.simulate.simulation import Figures, Router, Scaler, Simulation, quantile
from shared.scaling.pools import PoolSettings

CHART = Path(__file__).parents[2] / "docs" / "scaling.svg"
SLOTS_PER_ENGINE = 4
GAP_S = 600.0
"""Silence in the middle of the load of the autoscalers."""

ROUTERS: dict[str, Callable[[int], Router]] = {
    "shared queue, in turns": lambda engines: SharedQueue(),
    "slots": lambda engines: Slots(SLOTS_PER_ENGINE * engines),
}
"""Routers by name; each is made for a number of engines."""

SCALERS: dict[str, Callable[[PoolSettings], Scaler]] = {"own policy": OwnPolicy, "KEDA": Keda}
MAX_ENGINES = 32
SCALED_REQUESTS = 40_000
SCALED_RATE = 5.0


def run_router(router: str, load: str, num_engines: int, num_requests: int, seed: int) -> Figures:
    """Run one router under one load, with engines that are there from the beginning."""
    make, rate = LOADS[load]
    requests = make(num_requests, rate * num_engines, seed)
    return Simulation(requests, ROUTERS[router](num_engines), num_engines).run()


def run_scaler(scaler: str, num_requests: int, max_engines: int, seed: int) -> Figures:
    """Run a pool from zero, with a silence in the middle of the load."""
    requests = bursty_chat(num_requests, SCALED_RATE * max_engines, seed, GAP_S)
    settings = PoolSettings(max=max_engines)
    return Simulation(requests, SharedQueue(), 0, SCALERS[scaler](settings)).run()


def routing_tables(num_engines: int, num_requests: int, seed: int) -> Iterator[str]:
    """Yield the lines of one table for each load."""
    for load, (_, rate) in LOADS.items():
        yield f"**{load}**, {rate:g} requests a second and engine"
        yield ""
        yield "| routing | TTFT p50 | p99 | answer p99 | prompt tokens from cache | stolen |"
        yield "|---|---|---|---|---|---|"
        for name in ROUTERS:
            figures = run_router(name, load, num_engines, num_requests, seed)
            stolen = figures.num_stolen / num_requests
            cells = [quantile(figures.ttft_s, 0.5), quantile(figures.ttft_s, 0.99)]
            cells.append(quantile(figures.answer_s, 0.99))
            times = " | ".join(f"{cell:.3f}" for cell in cells)
            yield f"| {name} | {times} | {figures.hit_rate:.1%} | {stolen:.1%} |"
        yield ""


def scaling_table(seed: int) -> Iterator[str]:
    """Yield the lines of the table of autoscalers, and write the chart."""
    yield "| policy | TTFT p50 | p99 | max | engine-seconds a request | starts |"
    yield "|---|---|---|---|---|---|"
    lines = {}
    for name in SCALERS:
        figures = run_scaler(name, SCALED_REQUESTS, MAX_ENGINES, seed)
        lines[name] = [(at_s, float(size)) for at_s, size, _ in figures.sizes]
        cells = [quantile(figures.ttft_s, part) for part in (0.5, 0.99, 1.0)]
        times = " | ".join(f"{cell:.3f}" for cell in cells)
        engine_s = figures.engine_s / SCALED_REQUESTS
        yield f"| {name} | {times} | {engine_s:.2f} | {figures.num_started} |"
    CHART.write_text(line_chart("ready engines", "simulated seconds", lines), encoding="utf-8")
