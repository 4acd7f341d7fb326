"""Run the cells of the fault matrix.

Cells that need the same kind of deployment share one, one after the other, each with its own load.
A deployment on which a cell failed is closed, so that the next cell starts with a new one.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from ops.chaos.history import now
from ops.chaos.matrix.cell import Cell
from ops.chaos.matrix.deployments import DEPLOYMENTS, System
from ops.chaos.matrix.table import CELLS
from ops.chaos.processes import network
from shared.telemetry import logs

app = App(name="python -m ops.chaos.matrix", help=__doc__)
CELL_TIMEOUT_S = 240.0
# Cell 7 with seed 3 has the requests of plan 3007.
SEED_STEP = 1000
MAX_SHOWN = 4


class Result(Struct, frozen=True):
    """Result of one cell with one seed."""

    cell: str
    seed: int
    seconds: float
    violations: list[str]
    figures: dict[str, float]
    folder: str = ""
    """Folder of the deployment, if the cell failed."""


async def run_matrix(seeds: Sequence[int], names: Sequence[str]) -> list[Result]:
    """Run all cells that can run here, or only cells whose names contain one of `names`."""
    chosen = [cell for cell in CELLS if not names or any(name in cell.name for name in names)]
    results = []
    for cell in chosen:
        if cell.reason:
            _print(f"  --   {cell.name}: {cell.reason}")
    for seed in seeds:
        async for result in _run_all([cell for cell in chosen if not cell.reason], seed):
            results.append(result)
            _report(result)
    return results


async def _run_all(cells: Sequence[Cell], seed: int) -> AsyncIterator[Result]:
    for kind in dict.fromkeys(cell.on for cell in cells):
        deployment: System | None = None
        try:
            for cell in [cell for cell in cells if cell.on == kind]:
                deployment = deployment or DEPLOYMENTS[kind]()
                result = await _run(cell, deployment, seed)
                yield result
                if result.violations:
                    failed, deployment = deployment, None
                    await failed.close()
        finally:
            if deployment is not None:
                await deployment.close()
                deployment.remove()


async def _run(cell: Cell, deployment: System, seed: int) -> Result:
    assert cell.run is not None
    began = now()
    try:
        async with asyncio.timeout(CELL_TIMEOUT_S):
            await deployment.open()
            outcome = await deployment.run(_settings(cell, deployment, seed), cell.run)
    except Exception as error:
        outcome = deployment.outcome
        outcome.violations.append(f"the cell failed: {error!r}")
    bad = outcome.violations
    folder = str(deployment.folder) if bad else ""
    return Result(cell.name, seed, now() - began, bad, outcome.figures, folder)


def _settings(cell: Cell, deployment: System, seed: int) -> Any:
    """Return the settings of the deployment, with the load of the cell."""
    load = {"requests": max(1, round(deployment.settings.rate * cell.load_s))} | cell.change
    return msgspec.structs.replace(
        deployment.settings, seed=SEED_STEP * seed + CELLS.index(cell), **load
    )


# -- the report -------------------------------------------------------------------------------


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _report(result: Result) -> None:
    figures = ", ".join(f"{name} {value:.2f}" for name, value in result.figures.items())
    mark = "FAIL" if result.violations else " ok "
    _print(f"{mark} {result.cell} [{result.seed}] {result.seconds:.0f} s: {figures}")
    for violation in result.violations[:MAX_SHOWN]:
        _print(f"       {violation}")
    if len(result.violations) > MAX_SHOWN:
        _print(f"       and {len(result.violations) - MAX_SHOWN} more")
    if result.folder:
        _print(f"       {result.folder}")


def markdown(results: Sequence[Result]) -> str:
    """Return a table with a row for each cell, with the worst of its figures."""
    lines = ["| cell | how | bound | passed | worst figures |", "|---|---|---|---|---|"]
    for cell in CELLS:
        own = [result for result in results if result.cell == cell.name]
        if cell.reason:
            lines.append(f"| {cell.name} | - | - | cannot run here | {cell.reason} |")
        elif own:
            passed = sum(not result.violations for result in own)
            note = f"; {cell.limit}" if cell.limit and passed < len(own) else ""
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
    seed: Annotated[list[int] | None, Parameter(consume_multiple=True, negative="")] = None,
    cell: Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")] = None,
) -> int:
    """Run the matrix, and print a markdown table of the results.

    Parameters
    ----------
    seed
        Seeds, one or more; by default 1.
    cell
        Parts of names; by default all cells run, else only cells with one of them in the name.
    """
    logs.configure_logging("error", role="matrix")
    if network.why_unavailable() is None:
        # This comes before any thread or socket exists.
        network.isolate()
    results = asyncio.run(run_matrix(seed or [1], cell or []))
    _print(markdown(results))
    failed = sum(bool(result.violations) for result in results)
    _print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
