"""Runs the cells of the fault matrix.

    python -m ops.chaos.matrix [--seed 1 --seed 2] [--cell NAME] [--out FILE]

Cells that need the same kind of scene run on one, one after the other, each with a load of its own.
A scene on which something was wrong is thrown away, so that the next cell begins on a whole one.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from ops.chaos.history import now
from ops.chaos.matrix.scene import Scene, open_scene
from ops.chaos.matrix.table import CELLS, Cell
from ops.chaos.plan import Settings
from ops.chaos.processes import network
from shared.telemetry import logs

app = App(name="matrix", help=__doc__)
CELL_TIMEOUT_S = 240.0
# Cell 7 with seed 3 asks for the requests of plan 3007.
SEED_STEP = 1000
SHOWN = 4


class Result(Struct, frozen=True):
    cell: str
    seed: int
    seconds: float
    violations: list[str]
    figures: dict[str, float]
    folder: str = ""
    """Where the run can be looked at, if something was wrong."""


async def run_matrix(
    seeds: Sequence[int], names: Sequence[str] = (), out: Path | None = None
) -> list[Result]:
    """Run all cells that can run here, or those whose names contain one of `names`."""
    chosen = [cell for cell in CELLS if not names or any(name in cell.name for name in names)]
    results = []
    for cell in chosen:
        if cell.reason:
            _say(f"  --   {cell.name}: {cell.reason}")
    for seed in seeds:
        async for result in _run_all([cell for cell in chosen if not cell.reason], seed):
            results.append(result)
            _report(result)
            if out is not None:
                with out.open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
    return results


async def _run_all(cells: Sequence[Cell], seed: int) -> AsyncIterator[Result]:
    for kind in dict.fromkeys(cell.on for cell in cells):
        scene: Scene | None = None
        try:
            for cell in [cell for cell in cells if cell.on == kind]:
                scene = scene or open_scene(kind)
                result = await _run(cell, scene, seed)
                yield result
                if result.violations:
                    failed, scene = scene, None
                    await failed.close()
        finally:
            if scene is not None:
                await scene.close()
                scene.remove()


async def _run(cell: Cell, scene: Scene, seed: int) -> Result:
    assert cell.run is not None
    began = now()
    try:
        async with asyncio.timeout(CELL_TIMEOUT_S):
            await scene.open()
            outcome = await scene.run(_settings(cell, scene, seed), cell.run)
    except Exception as error:
        outcome = scene.outcome
        outcome.violations.append(f"the cell itself: {error!r}")
    bad = outcome.violations
    folder = str(scene.folder) if bad else ""
    return Result(cell.name, seed, now() - began, bad, outcome.figures, folder)


def _settings(cell: Cell, scene: Scene, seed: int) -> Settings:
    """Of the scene's processes, with a load of the cell's own."""
    load = {"requests": max(1, round(scene.settings.rate * cell.load_s))} | cell.change
    return msgspec.structs.replace(
        scene.settings, seed=SEED_STEP * seed + CELLS.index(cell), **load
    )


# -- the report -------------------------------------------------------------------------------


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _report(result: Result) -> None:
    figures = ", ".join(f"{name} {value:.2f}" for name, value in result.figures.items())
    mark = "FAIL" if result.violations else " ok "
    _say(f"{mark} {result.cell} [{result.seed}] {result.seconds:.0f} s: {figures}")
    for violation in result.violations[:SHOWN]:
        _say(f"       {violation}")
    if len(result.violations) > SHOWN:
        _say(f"       and {len(result.violations) - SHOWN} more")
    if result.folder:
        _say(f"       {result.folder}")


def markdown(results: Sequence[Result]) -> str:
    """One line for each cell of the matrix, with the worst of its figures."""
    lines = ["| cell | how | bound | passed | worst figures |", "|---|---|---|---|---|"]
    for cell in CELLS:
        own = [result for result in results if result.cell == cell.name]
        if cell.reason:
            lines.append(f"| {cell.name} | - | - | cannot run here | {cell.reason} |")
        elif own:
            passed = sum(not result.violations for result in own)
            note = f"; {cell.known}" if cell.known and passed < len(own) else ""
            lines.append(
                f"| {cell.name} | {cell.how} | {cell.bound} | {passed} of {len(own)} |"
                f" {_worst(own)}{note} |"
            )
    return "\n".join(lines)


def _worst(results: Sequence[Result]) -> str:
    names = dict.fromkeys(name for result in results for name in result.figures)
    return ", ".join(
        f"{name} {max(result.figures.get(name, 0.0) for result in results):.2f}" for name in names
    )


@app.default
def main(
    *,
    seed: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    cell: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    out: Path | None = None,
    table: bool = True,
) -> int:
    """Run the matrix.

    Parameters
    ----------
    seed
        One or more; by default 1.
    cell
        Only cells whose names contain one of these.
    out
        A file to which every result is added, one JSON object a line.
    table
        Print the markdown table at the end.
    """
    logs.configure_logging("error", role="matrix")
    if network.why_not() is None:
        # Before there is any thread or socket.
        network.isolate()
    results = asyncio.run(run_matrix(seed or [1], cell or [], out))
    if table:
        _say(markdown(results))
    failed = sum(bool(result.violations) for result in results)
    _say(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
