"""The tables and the chart of docs/contribute/scaling.md."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ops.simulate.autoscaling import Keda, Oracle, OwnPolicy
from ops.simulate.chart import line_chart
from ops.simulate.engine import Cost, Request
from ops.simulate.loads import LOADS, bursts, bursty_chat, no_sharing
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

SCALERS: dict[str, Callable[[PoolSettings, list[Request]], Scaler]] = {
    "own policy": lambda settings, _: OwnPolicy(settings),
    "KEDA": lambda settings, _: Keda(settings),
    "KEDA, 5 s and 120 s": lambda settings, _: Keda(settings, 5.0, 120.0),
    "oracle": lambda settings, requests: Oracle(settings, requests, Cost()),
}
BEFORE_S = 120.0
"""Time before the first request, in which the oracle can start engines."""
CHART_LOAD = "bursts, silences of 100 s"
MAX_ENGINES = 32
SCALED_RATE = 5.0
SCALED_LOADS: dict[str, Callable[[int, int, int], list[Request]]] = {
    "chats, one silence of 600 s": lambda num, engines, seed: bursty_chat(
        2 * num, SCALED_RATE * engines, seed, GAP_S
    ),
    CHART_LOAD: lambda num, engines, seed: bursts(num, engines / 2, seed, 100.0),
    "bursts, silences of 300 s": lambda num, engines, seed: bursts(num, engines / 2, seed, 300.0),
    "even load": lambda num, engines, seed: no_sharing(num, 1.25 * engines, seed),
}
"""Loads of the autoscalers, each for a number of requests, a number of engines, and a seed."""
SCALED_REQUESTS = 20_000


def run_router(router: str, load: str, num_engines: int, num_requests: int, seed: int) -> Figures:
    """Run one router under one load, with engines that are there from the beginning."""
    make, rate = LOADS[load]
    requests = make(num_requests, rate * num_engines, seed)
    return Simulation(requests, ROUTERS[router](num_engines), num_engines).run()


def run_scaler(scaler: str, requests: Sequence[Request], max_engines: int) -> Figures:
    """Run a pool from zero."""
    later = [request.at(request.arrived_s + BEFORE_S) for request in requests]
    make = SCALERS[scaler]
    pool = PoolSettings(max=max_engines)
    return Simulation(later, SharedQueue(), 0, make(pool, later)).run()


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


def scaling_tables(seed: int, recorded: Sequence[Request] = ()) -> Iterator[str]:
    """Yield the lines of the tables of autoscalers, and write the chart.

    With a recorded load, there is only its table.
    """
    loads = {name: make(SCALED_REQUESTS, MAX_ENGINES, seed) for name, make in SCALED_LOADS.items()}
    for load, requests in ({"recorded": recorded} if recorded else loads).items():
        yield f"**{load}**"
        yield ""
        yield "| policy | TTFT p50 | p95 | p99 | engine-seconds a request | starts |"
        yield "|---|---|---|---|---|---|"
        lines = {}
        for name in SCALERS:
            figures = run_scaler(name, requests, MAX_ENGINES)
            lines[name] = [(at_s, float(size)) for at_s, size, _ in figures.sizes]
            cells = [quantile(figures.ttft_s, part) for part in (0.5, 0.95, 0.99)]
            times = " | ".join(f"{cell:.3f}" for cell in cells)
            engine_s = figures.engine_s / len(requests)
            yield f"| {name} | {times} | {engine_s:.2f} | {figures.num_started} |"
        yield ""
        if load == CHART_LOAD:
            del lines["KEDA"]
            svg = line_chart("ready engines", "simulated seconds", lines)
            CHART.write_text(svg, encoding="utf-8")
