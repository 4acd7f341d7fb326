"""Plant every bug of one role, and every alteration, each in a forked process; print what fails.

`python -m tests.chaos.plant_all ROLE`, with CHAOS_DIR in the environment.
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import cast

from ops.chaos.alterations import ALTERATIONS

# Importing the catalog registers all bugs.
from ops.chaos.bugs import catalog  # noqa: F401
from ops.chaos.bugs.registry import BUGS
from ops.chaos.history import Journal

# So does the actuator. Its process has no role of the product.
from ops.chaos.processes import actuator  # noqa: F401
from ops.chaos.processes.pool import ACTUATOR, STAGE_ROLES
from ops.chaos.worker.crash_points import CrashPoints
from ops.chaos.worker.fakes import Role
from ops.chaos.worker.watched_worker import prepare


def is_possible(plant: Callable[[], None], name: str) -> bool:
    if (pid := os.fork()) == 0:
        try:
            plant()
        except BaseException:
            sys.stderr.write(f"{name}: {traceback.format_exc()}")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def main(role: str) -> int:
    journal = Journal(Path(os.environ["CHAOS_DIR"]) / f"{role}.jsonl")
    # The actuator has imported what it needs; a worker is prepared in the same manner: its modules
    # are imported and its calls observed.
    if role != ACTUATOR:
        crash = CrashPoints({}, "", lambda point: None)
        of_product = cast(Role, STAGE_ROLES.get(role, role))
        prepare(of_product, journal, crash, of_product in FAKE_ROLES, 0.0)
    plants = {name: bug.plant for name, bug in BUGS.items() if bug.role in (role, "any")}
    if role == "engine":
        plants |= ALTERATIONS
    possible = [is_possible(plant, name) for name, plant in plants.items()]
    return 0 if all(possible) else 1


FAKE_ROLES = ("renderer", "engine")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
