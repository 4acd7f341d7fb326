"""`make rolling`: workers of an older commit beside those of this tree, in every order.

For each role, a worker of the other version joins a complete fleet of one version; then the fleet
is replaced role by role, in both directions. Each cell sends requests of all kinds, and every one
of them must be answered. With videos, which the older commit does not know, its workers have to
leave them to the newer ones. Needs the history of this repository.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from ops.rolling.fleet import NEW, ROLES, Fleet, running, unpack
from ops.rolling.load import send_all
from shared.protocol.versions import range_words
from shared.telemetry import logs

OLD_COMMIT = "b08c8524"
# Roles whose older worker can leave a task: an older gateway or coordinator is a client's end.
LEAVES = ("engine", "prefill", "encoder", "renderer")
OTHER = {"old": "new", "new": "old"}


def say(text: str) -> None:
    sys.stdout.write(f"rolling: {text}\n")
    sys.stdout.flush()


class Run:
    """The cells of one run, and whether all of them were answered."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.num_cells = self.num_requests = self.num_failures = 0

    async def cell(self, fleet: Fleet, name: str, *, with_video: bool = False) -> None:
        began = time.monotonic()
        gateways = await fleet.gateways()
        tally = await send_all(gateways, self._number, with_video=with_video)
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
    """Return the ranges that the workers' heartbeats tell; older ones tell none."""
    ranges = Counter(range_words(beat.reads) for beat in await fleet.beats())
    return ", ".join(f"{words}: {count}" for words, count in sorted(ranges.items()))


async def beside(run: Run, trees: dict[str, Path], base: str, roles: list[str]) -> None:
    """Join a worker of the other version to a fleet of `base`, role by role; then replace all."""
    other = OTHER[base]
    with tempfile.TemporaryDirectory(prefix="pagemill-rolling-") as folder:
        async with running(Path(folder), trees) as fleet:
            await fleet.start(base, "coordinator")
            await fleet.start(base, *(role for role in ROLES if role != "coordinator"))
            await run.cell(fleet, f"all {base}")
            for role in roles:
                await fleet.start(other, role)
                await run.cell(fleet, f"{base}, and a further {role} that is {other}")
                if base == "new" and role in LEAVES:
                    name = f"{base}, and a further {role} that is {other}, videos"
                    await run.cell(fleet, name, with_video=True)
                await fleet.stop(other, role)
            # An upgrade goes from the last stage to the first, and a way back the other way.
            for role in roles if base == "old" else roles[::-1]:
                await fleet.start(other, role)
                await fleet.stop(base, role)
                await run.cell(fleet, f"{base}, and so far replaced by {other}: up to the {role}")


async def check(arguments: argparse.Namespace) -> int:
    run = Run(arguments.requests)
    with tempfile.TemporaryDirectory(prefix="pagemill-old-") as folder:
        old = unpack(arguments.old, Path(folder))
        for base in arguments.base or ("old", "new"):
            await beside(run, {"old": old, "new": NEW}, base, arguments.role or list(ROLES))
    say(f"{run.num_cells} cells, {run.num_requests} requests, {run.num_failures} failures")
    return 1 if run.num_failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make rolling", description=__doc__)
    parser.add_argument("--old", default=OLD_COMMIT, help="the older commit")
    parser.add_argument("--requests", type=int, default=200, help="requests of each cell")
    parser.add_argument("--base", action="append", choices=("old", "new"), help="by default both")
    parser.add_argument("--role", action="append", choices=ROLES, help="by default all")
    arguments = parser.parse_args()
    logs.configure_logging("error", role="rolling")
    return asyncio.run(check(arguments))


if __name__ == "__main__":
    sys.exit(main())
