"""`make rolling`: workers of older commits together with workers of this tree, in every order.

Each worker of the other version joins a complete fleet of one version. Then the fleet is replaced
worker by worker, in both directions. Each cell sends requests of all kinds, and every request must
be answered. Needs the history of this repository.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from ops.harness.deployment import ROOT
from ops.rolling.fleet import WORKERS, Fleet, running, unpack
from ops.rolling.load import send_all
from shared.protocol.versions import range_words
from shared.telemetry import logs

# Commits from the last change on that needs a drain: since then, parts of requests have ids that no
# client may choose. Workers of older commits cannot run together with newer ones.
OLDER = ("0c810446",)
OTHER = {"old": "new", "new": "old"}


def say(text: str) -> None:
    sys.stdout.write(f"rolling: {text}\n")
    sys.stdout.flush()


class Run:
    """The cells of one run, and whether all of them were answered."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.num_cells = self.num_requests = self.num_failures = 0

    async def cell(self, fleet: Fleet, name: str) -> None:
        began = time.monotonic()
        tally = await send_all(await fleet.processes.gateways(), self._number)
        self.num_cells += 1
        self.num_requests += tally.total
        self.num_failures += tally.failures.total()
        took_s = time.monotonic() - began
        say(
            f"{name}: {tally.answered} of {tally.total} answered in {took_s:.0f} s,"
            f" the slowest in {tally.slowest_s:.1f} s; workers read {await _versions(fleet)}"
        )
        for failure, count in tally.failures.most_common(5):
            say(f"  {count}: {failure}")


async def _versions(fleet: Fleet) -> str:
    """Return the version ranges in the workers' heartbeats; older workers publish none."""
    ranges = Counter(range_words(beat.reads) for beat in await fleet.processes.beats())
    return ", ".join(f"{words}: {count}" for words, count in sorted(ranges.items()))


async def replace_all(run: Run, trees: dict[str, Path], base: str) -> None:
    """Join each worker of the other version to a fleet of `base`; then replace all."""
    other, names = OTHER[base], tuple(WORKERS)
    async with running(trees) as fleet:
        await fleet.start(base, "coordinator")
        await fleet.start(base, *(name for name in names if name != "coordinator"))
        await run.cell(fleet, f"all {base}")
        for name in names:
            await fleet.start(other, name)
            await run.cell(fleet, f"{base}, and a further {name} that is {other}")
            await fleet.stop(other, name)
        # An upgrade goes from the last stage to the first, and a way back the other way.
        for name in names if base == "old" else names[::-1]:
            await fleet.start(other, name)
            await fleet.stop(base, name)
            await run.cell(fleet, f"{base}, and so far replaced by {other}: up to the {name}")


async def check(arguments: argparse.Namespace) -> int:
    run = Run(arguments.requests)
    for commit in arguments.old or OLDER:
        with tempfile.TemporaryDirectory(prefix="pagemill-old-") as folder:
            trees = {"old": unpack(commit, Path(folder)), "new": ROOT}
            for base in arguments.base or OTHER:
                say(f"{commit} is the old version")
                await replace_all(run, trees, base)
    say(f"{run.num_cells} cells, {run.num_requests} requests, {run.num_failures} failures")
    return 1 if run.num_failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make rolling", description=__doc__)
    parser.add_argument("--old", action="append", metavar="COMMIT", help="by default all of OLDER")
    parser.add_argument("--requests", type=int, default=200, help="requests of each cell")
    parser.add_argument(
        "--base",
        action="append",
        choices=OTHER,
        help="the version of the first fleet; by default first the one, then the other",
    )
    arguments = parser.parse_args()
    logs.configure_logging("error", role="rolling")
    return asyncio.run(check(arguments))


if __name__ == "__main__":
    sys.exit(main())
