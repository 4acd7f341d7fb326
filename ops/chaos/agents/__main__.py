"""Kill and stop agents while they call a tool that counts, and check every response.

python -m ops.chaos.agents --kills 500
python -m ops.chaos.agents --bugs
python -m ops.chaos.agents --restarts
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from ops.chaos.agents.beginnings import Beginnings
from ops.chaos.agents.bugs import BUGS
from ops.chaos.agents.kills import AgentScenario, Verdict
from ops.chaos.agents.restarts import Restarts
from ops.chaos.agents.tool_server import CountingServer

MAX_SHOWN = 20
FAULTS_FOR_BUGS = 8
"""Faults that each planted bug is given to show itself."""


def run_scenario(bug: str, faults: int, at_once: int, seed: int, expected: str = "") -> Verdict:
    with tempfile.TemporaryDirectory(prefix="pagemill-agents-") as name:
        scenario = AgentScenario(Path(name), bug, seed)
        return asyncio.run(scenario.run(faults, at_once, expected))


def run_restarts() -> list[str]:
    with tempfile.TemporaryDirectory(prefix="pagemill-restarts-") as name:
        found = asyncio.run(Restarts(Path(name), CountingServer(random.Random(1))).run())
    with tempfile.TemporaryDirectory(prefix="pagemill-beginnings-") as name:
        return found + asyncio.run(Beginnings(Path(name)).run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bug", choices=[*BUGS], default="")
    parser.add_argument("--bugs", action="store_true", help="plant each bug; each must be found")
    parser.add_argument(
        "--restarts", action="store_true", help="kill gateways, and restart all while a call waits"
    )
    arguments = parser.parse_args()
    console, began = Console(soft_wrap=True), time.monotonic()
    if arguments.restarts:
        found = run_restarts()
        console.print(*found, f"{len(found)} violations", sep="\n")
        return bool(found)
    if not arguments.bugs:
        bug, kills = arguments.bug, arguments.kills
        verdict = run_scenario(bug, kills, arguments.at_once, arguments.seed)
        for text in verdict.violations[:MAX_SHOWN]:
            console.print(text)
        console.print(f"{verdict}; {time.monotonic() - began:.0f} s")
        return bool(verdict.violations)
    missed = 0
    for bug, (_, expected) in BUGS.items():
        verdict = run_scenario(bug, FAULTS_FOR_BUGS, arguments.at_once, arguments.seed, expected)
        of_bug = [text for text in verdict.violations if text.startswith(expected)]
        missed += not of_bug
        found_after = f" (fault {verdict.num_faults})"
        console.print(f"{bug}: {of_bug[0] + found_after if of_bug else 'NOT FOUND'}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
