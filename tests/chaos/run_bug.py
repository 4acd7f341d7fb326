"""Runs the scenario of a planted bug with forks as its workers, and prints what the checker finds.

python -m tests.chaos.run_bug NAME
"""

import sys

import uvloop

from ops.chaos.bugs import catalog
from ops.chaos.processes.preloading import fork_preloaders
from ops.chaos.scenario import run_scenario


def _main(name: str) -> None:
    settings = catalog.settings_of(name)
    verdict, _ = uvloop.run(run_scenario(settings, preloaders=fork_preloaders(settings)))
    for invariant in sorted({violation.invariant for violation in verdict.violations}):
        sys.stdout.write(f"{invariant}\n")


if __name__ == "__main__":
    _main(sys.argv[1])
