"""`make rolling`: workers of older commits together with workers of this tree, in every order.

Each worker of the other version joins a complete fleet of one version. Then the fleet is replaced
worker by worker, in both directions. Each cell sends requests of all kinds that both versions know,
and every request must be answered. The oldest commit does not know videos: its workers must leave
them to newer workers. Needs the history of this repository.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ops.harness.deployment import ROOT
from ops.rolling.fleet import MAKES_MEDIA, WORKERS, Fleet, running, unpack
from ops.rolling.load import MEDIA, PLAIN, VIDEO, Kind, send_all
from shared.protocol.versions import range_words
from shared.telemetry import logs


@dataclass(frozen=True, slots=True)
class Older:
    """An older commit, and the workers and kinds of requests that it knows."""

    commit: str
    workers: tuple[str, ...]
    kinds: tuple[Kind, ...]
    changes_streams: bool = False
    """Whether its workers change streams at their start. They end where the broker refuses: streams
    of tasks in memory cannot move to disk. So this version joins only where it has made the
    streams."""
    leaves: tuple[str, ...] = ()
    """Workers that leave videos to newer workers; coordinators of this commit refuse them."""

    @property
    def makes_media(self) -> bool:
        return any(name in MAKES_MEDIA for name in self.workers)


_FIRST_WORKERS = ("engine", "prefill", "encoder", "renderer", "coordinator", "gateway")
OLDER = (
    # Before keys, tenants, versions of messages, videos and agents.
    Older("b08c8524", _FIRST_WORKERS, PLAIN, changes_streams=True, leaves=_FIRST_WORKERS[:4]),
    # Before tasks were in the memory of a broker.
    Older("919530a9", tuple(WORKERS), PLAIN + MEDIA + VIDEO),
)
OTHER = {"old": "new", "new": "old"}


def say(text: str) -> None:
    sys.stdout.write(f"rolling: {text}\n")
    sys.stdout.flush()


class Run:
    """The cells of one run, and whether all of them were answered."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.num_cells = self.num_requests = self.num_failures = 0

    async def cell(self, fleet: Fleet, name: str, kinds: tuple[Kind, ...]) -> None:
        began = time.monotonic()
        tally = await send_all(await fleet.processes.gateways(), self._number, kinds)
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


async def beside(run: Run, older: Older, trees: dict[str, Path], base: str) -> None:
    """Start a fleet of `base`, and replace it by the other version."""
    async with running(trees, makes_media=older.makes_media) as fleet:
        await fleet.start(base, "coordinator")
        await fleet.start(base, *(name for name in older.workers if name != "coordinator"))
        await replace_all(run, older, fleet, base)
        if older.changes_streams:
            await replace_all(run, older, fleet, OTHER[base])


async def replace_all(run: Run, older: Older, fleet: Fleet, base: str) -> None:
    """Join each worker of the other version to a fleet of `base`; then replace all."""
    other, names, kinds = OTHER[base], older.workers, older.kinds
    await run.cell(fleet, f"all {base}", kinds)
    for name in names:
        await fleet.start(other, name)
        cell = f"{base}, and a further {name} that is {other}"
        await run.cell(fleet, cell, kinds)
        if base == "new" and name in older.leaves:
            await run.cell(fleet, f"{cell}, videos", VIDEO)
        await fleet.stop(other, name)
    # An upgrade goes from the last stage to the first, and a way back the other way.
    for name in names if base == "old" else names[::-1]:
        await fleet.start(other, name)
        await fleet.stop(base, name)
        cell = f"{base}, and so far replaced by {other}: up to the {name}"
        await run.cell(fleet, cell, kinds)


async def check(arguments: argparse.Namespace) -> int:
    run = Run(arguments.requests)
    for older in OLDER:
        if arguments.old not in (None, older.commit):
            continue
        with tempfile.TemporaryDirectory(prefix="pagemill-old-") as folder:
            trees = {"old": unpack(older.commit, Path(folder)), "new": ROOT}
            for base in ["old"] if older.changes_streams else arguments.base or OTHER:
                say(f"{older.commit} is the old version")
                await beside(run, older, trees, base)
    say(f"{run.num_cells} cells, {run.num_requests} requests, {run.num_failures} failures")
    return 1 if run.num_failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make rolling", description=__doc__)
    commits = [older.commit for older in OLDER]
    parser.add_argument("--old", choices=commits, help="one older commit; by default all")
    parser.add_argument("--requests", type=int, default=200, help="requests of each cell")
    parser.add_argument(
        "--base",
        action="append",
        choices=OTHER,
        help="the version of the first fleet; by default both, if both can be first",
    )
    arguments = parser.parse_args()
    logs.configure_logging("error", role="rolling")
    return asyncio.run(check(arguments))


if __name__ == "__main__":
    sys.exit(main())
