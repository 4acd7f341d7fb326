"""Inject faults into a running system, record its events, and check them.

`python -m ops.chaos.matrix` runs the fault matrix.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import uvloop
from cyclopts import App
from msgspec.structs import replace
from rich.console import Console

from ops.chaos.bugs.catalog import settings_of
from ops.chaos.bugs.registry import BUGS
from ops.chaos.bugs.scenarios import AGENTS, SCENARIOS
from ops.chaos.checks.checker import Verdict, check
from ops.chaos.plan import Settings
from ops.chaos.processes.preloading import fork_preloaders
from ops.chaos.runs import QUICK, RUNS
from ops.chaos.scenario import run_scenario
from ops.chaos.watched_deployment import read_run
from shared.telemetry import logs

MAX_SHOWN = 20
FAULTS_FOR_BUGS = 8
"""Number of faults after which agents with a planted bug are stopped."""
P = ParamSpec("P")
Value = TypeVar("Value")

app = App(name="python -m ops.chaos", help=__doc__)
console = Console(highlight=False, soft_wrap=True)


@app.command
def run(
    name: Literal[
        "kills",
        "model",
        "broker",
        "omni",
        "sounds",
        "leaders",
        "rolling",
        "scale",
        "shipped",
        "batch",
    ],
    /,
    *,
    seed: int = 1,
) -> int:
    """Run one of the long runs of docs/contribute/reliability.md.

    Parameters
    ----------
    name
        Name of the run.
    seed
        Seed of the requests, the faults and the behaviour of clients.
    """
    return 0 if _run(name, replace(RUNS[name], seed=seed)) else 1


@app.command
def quick(*names: str, seed: int = 1) -> int:
    """Run the short scenarios, or the named ones, with fake and real engines; every role is killed.

    Each scenario has a separate process. They run one at a time: two at once would be slower than
    the bounds on recovery, on a machine of two cores.

    Parameters
    ----------
    names
        Names of scenarios; by default all run.
    seed
        Seed of the requests, the faults and the behaviour of clients.
    """
    _check_names(names, QUICK)
    if len(names) == 1:
        return 0 if _run(names[0], replace(QUICK[names[0]], seed=seed)) else 1

    def run_alone(name: str) -> int:
        command = [sys.executable, "-m", "ops.chaos", "quick", name, "--seed", str(seed)]
        return subprocess.run(command, check=False).returncode

    # The others run even if one fails: two failures show more than one does.
    return max([run_alone(name) for name in names or QUICK])


@app.command
def bugs(*names: str) -> int:
    """Plant each bug, or the named ones, in its scenario; the checker must find each of them.

    The same scenarios run first without a bug, and must be clean.

    Parameters
    ----------
    names
        Names of bugs; by default all are planted.
    """
    _check_names(names, BUGS)
    chosen = names or tuple(BUGS)
    scenarios = dict.fromkeys(BUGS[name].scenario for name in chosen)
    unclean = [name for name in scenarios if not in_fork(_run_without_bug, name)]
    missed = []
    for name in chosen:
        violations = in_fork(_plant, name)
        caught = BUGS[name].invariants & set(violations)
        console.print(f"{'caught' if caught else 'MISSED'} {name}: {dict(violations)}")
        missed += [] if caught else [name]
    console.print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    if unclean:
        console.print(f"scenarios that are not clean without a bug: {', '.join(unclean)}")
    return 1 if missed or unclean else 0


def _check_names(names: Iterable[str], choices: Iterable[str]) -> None:
    if unknown := set(names).difference(choices):
        raise SystemExit(
            f"unknown: {', '.join(sorted(unknown))}; there is: {', '.join(map(repr, choices))}"
        )


def _run_without_bug(scenario: str) -> bool:
    """Return whether a scenario is clean."""
    if scenario == AGENTS:
        return agents(kills=FAULTS_FOR_BUGS) == 0
    return _run(scenario, SCENARIOS[scenario])


def _plant(name: str) -> Counter[str]:
    """Run a bug's scenario with the bug; count the violations of each invariant."""
    if BUGS[name].scenario == AGENTS:
        from ops.chaos.agents.kills import run_agents

        return run_agents(FAULTS_FOR_BUGS, bug=name).invariants
    settings = settings_of(name)
    verdict, _ = uvloop.run(run_scenario(settings, fork_preloaders(settings)))
    return Counter(violation.invariant for violation in verdict.violations)


def in_fork(function: Callable[P, Value], *args: P.args, **kwargs: P.kwargs) -> Value:
    """Call a function in a separate process, and return its result, which must be small.

    A scenario without models hides torch, and later scenarios in the same process would not find
    it. Workers that are forked from a scenario end by SystemExit, which nothing on the stack may
    catch.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        sender.send(function(*args, **kwargs))
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not receiver.poll():
        raise ChildProcessError(f"the process of a scenario ended with status {status}")
    value: Value = receiver.recv()
    return value


@app.command
def agents(*, kills: int = 500, seed: int = 1, restarts: bool = False) -> int:
    """Kill and stop agents while they call a tool that counts its calls, and check each response.

    Parameters
    ----------
    kills
        Number of faults that hit an agent at work.
    seed
        Seed of the faults and of the tool's pauses.
    restarts
        Kill gateways instead of agents, and restart all processes while calls wait for approval.
    """
    # Not at the top: the tool server has threads, and other runs fork.
    from ops.chaos.agents.kills import run_agents
    from ops.chaos.agents.restarts import run_restarts

    if restarts:
        violations = run_restarts()
        summary = f"{len(violations)} violations"
    else:
        began = time.monotonic()
        verdict = run_agents(kills, seed)
        violations, summary = verdict.violations, f"{verdict}; {time.monotonic() - began:.0f} s"
    for text in violations[:MAX_SHOWN]:
        console.print(text, markup=False)
    console.print(summary, markup=False)
    return bool(violations)


@app.command(name="check")
def check_again(folder: Path, /) -> int:
    """Check a recorded run again.

    Parameters
    ----------
    folder
        Folder of the run, which is kept if a check fails.
    """
    run = read_run(folder)
    verdict = check(run)
    for violation in verdict.violations:
        console.print(f"  {violation}", markup=False)
    console.print(
        _row(folder.name, run.settings, verdict, verdict.figures["seconds"]), markup=False
    )
    return 0 if verdict.clean else 1


def _run(name: str, settings: Settings) -> bool:
    logs.configure_logging("error", role="chaos")
    began = time.monotonic()
    verdict, folder = uvloop.run(run_scenario(settings, fork_preloaders(settings)))
    took_s = time.monotonic() - began
    for violation in verdict.violations[:MAX_SHOWN]:
        console.print(f"  {violation}", markup=False)
    if not verdict.clean:
        console.print(f"  see {folder}")
    console.print(_row(name, settings, verdict, took_s), markup=False)
    figures = verdict.figures
    console.print(
        f"  engines began {figures['begun']:.0f} requests {figures['beginnings']:.0f} times"
    )
    for kind in ("payloads", "http", "speech", "images", "batches"):
        if counts := verdict.counts[kind]:
            console.print(f"  {kind}: {_listed(sorted(counts.items()))}", markup=False)
    if "engine_s" in figures:
        console.print(f"  {_scaled_line(figures)}", markup=False)
    return verdict.clean


def _scaled_line(figures: dict[str, float]) -> str:
    """Return a line with the figures of a scaled pool."""
    ratio = figures["engine_s"] / (figures["simulated_engine_s"] or 1.0)
    return (
        f"pool: {figures['peak_engines']:.0f} engines at most, each ready after"
        f" {figures['cold_start_s']:.2f} s,"
        f" at zero {figures['zero_after_s']:.1f} s after the last answer;"
        f" {figures['engine_s']:.0f} engine-seconds, {ratio:.2f} times the"
        f" {figures['simulated_engine_s']:.0f} of the simulator"
    )


def _row(name: str, settings: Settings, verdict: Verdict, took_s: float) -> str:
    """Return a row of the table in docs/contribute/reliability.md."""
    figures, counts = verdict.figures, verdict.counts
    cells = (
        name,
        settings.seed,
        f"{figures['requests']:.0f}: {_listed(counts['ends'].most_common())}",
        _listed(sorted(counts["faults"].items())) or "none",
        f"{figures['resumed']:.0f}",
        f"{figures['p50_s']:.2f} / {figures['p99_s']:.2f} / {figures['max_s']:.1f}",
        f"{figures['longest_gap_s']:.1f}",
        f"{took_s:.0f}",
        len(verdict.violations),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _listed(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts)


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
