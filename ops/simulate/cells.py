"""Cells: a model's engines in groups that know nothing of each other, with a stream each."""

from collections.abc import Iterator

from ops.simulate.autoscaling import OwnPolicy
from ops.simulate.engine import Engine, Request
from ops.simulate.loads import LOADS, bursty_chat
from ops.simulate.routers import SharedQueue, slot_of
from ops.simulate.simulation import Figures, Simulation, quantile
from shared.scaling.pools import PoolSettings

NUM_CELLS = (1, 2, 4, 8, 16)
GAP_S = 600.0
BLOCK_TOKENS, MIN_BLOCKS = 16, 4


def cell_of(request: Request, num_cells: int) -> int:
    """Return the cell of a request: its slot, but by half of its blocks as a power of two.

    No engine helps a cell that all prompts with the same short beginning would go to.
    """
    half = max(MIN_BLOCKS, request.prompt // BLOCK_TOKENS // 2)
    return slot_of(request, num_cells, BLOCK_TOKENS * (1 << half.bit_length() - 1))


class Cells:
    """A shared queue for each cell, see `cell_of`.

    Engines belong to cells in turns. No engine helps another cell, not even an idle one.
    """

    def __init__(self, num_cells: int) -> None:
        self._cells = [SharedQueue() for _ in range(num_cells)]

    def route(self, simulation: Simulation, request: Request) -> None:
        self._cells[cell_of(request, len(self._cells))].route(simulation, request)

    def ask(self, simulation: Simulation, engine: Engine) -> None:
        self._cells[engine.number % len(self._cells)].ask(simulation, engine)

    def change(self, simulation: Simulation) -> None:
        """Keep the queues of all cells."""

    def num_waiting(self) -> int:
        return sum(cell.num_waiting() for cell in self._cells)

    def oldest_s(self) -> float | None:
        found = (cell.oldest_s() for cell in self._cells)
        return min((at_s for at_s in found if at_s is not None), default=None)


def run_cells(num_cells: int, load: str, num_engines: int, num_requests: int, seed: int) -> Figures:
    """Run a number of cells, each with a shared queue, under one load."""
    make, rate = LOADS[load]
    requests = make(num_requests, rate * num_engines, seed)
    return Simulation(requests, Cells(num_cells), num_engines).run()


def run_scaled_cells(num_cells: int, requests: list[Request], max_engines: int) -> list[Figures]:
    """Run a pool from zero for each cell, all of which have as many engines at most together."""
    parts: list[list[Request]] = [[] for _ in range(num_cells)]
    for request in requests:
        parts[cell_of(request, num_cells)].append(request)
    settings = PoolSettings(max=max_engines // num_cells)
    return [Simulation(part, SharedQueue(), 0, OwnPolicy(settings)).run() for part in parts]


def scaled_table(num_requests: int, max_engines: int, rate: float, seed: int) -> Iterator[str]:
    """Yield the lines of the table of scaled cells; a number of cells has the same requests."""
    yield "| cells | engines in each at most | TTFT p50 | p99 | engine-seconds a request | starts |"
    yield "|---|---|---|---|---|---|"
    for num_cells in NUM_CELLS:
        requests = bursty_chat(num_requests, rate * max_engines, seed, GAP_S)
        cells = run_scaled_cells(num_cells, requests, max_engines)
        ttft_s = [s for figures in cells for s in figures.ttft_s]
        times = " | ".join(f"{quantile(ttft_s, part):.3f}" for part in (0.5, 0.99))
        engine_s = sum(figures.engine_s for figures in cells) / num_requests
        starts = sum(figures.num_started for figures in cells)
        row = f"| {num_cells} | {max_engines // num_cells} | {times}"
        yield f"{row} | {engine_s:.2f} | {starts} |"
    yield ""


def cell_tables(num_engines: int, num_requests: int, seed: int) -> Iterator[str]:
    """Yield the lines of one table for each load, with a row for each number of cells."""
    for load in LOADS:
        yield f"**{load}**, {LOADS[load][1]:g} requests a second and engine, {num_engines} engines"
        yield ""
        yield "| cells | engines in each | TTFT p50 | p99 | answer p99 | prompt tokens from cache |"
        yield "|---|---|---|---|---|---|"
        for num_cells in NUM_CELLS:
            figures = run_cells(num_cells, load, num_engines, num_requests, seed)
            cells = [quantile(figures.ttft_s, 0.5), quantile(figures.ttft_s, 0.99)]
            cells.append(quantile(figures.answer_s, 0.99))
            times = " | ".join(f"{cell:.3f}" for cell in cells)
            row = f"| {num_cells} | {num_engines // num_cells} | {times}"
            yield f"{row} | {figures.hit_rate:.1%} |"
        yield ""
