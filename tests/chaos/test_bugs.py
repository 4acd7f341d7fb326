"""The checker finds bugs that are planted on purpose.

A harness that has never found anything may be unable to.

Each scenario runs the whole system for 15 to 60 s. One is part of every test run; `make
chaos-bugs` runs them all, and first each scenario without a bug.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ops.chaos.bugs import catalog  # noqa: F401  # It registers the bugs.
from ops.chaos.bugs.registry import BUGS
from ops.chaos.bugs.scenarios import AGENTS, SCENARIOS

ROOT = Path(__file__).parent.parent.parent
QUICK = (pytest.param("final_record_twice", marks=pytest.mark.long), "no_fencing")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found(name: str) -> None:
    # Workers are forked from this process, so it has no threads. It has no torch, which renderers
    # must not find.
    command = [sys.executable, "-m", "tests.chaos.run_bug", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    invariants = set(done.stdout.split())
    assert invariants & BUGS[name].invariants, f"{invariants or 'nothing'} found; {done.stderr}"


def test_every_bug_has_a_scenario_and_an_invariant() -> None:
    assert len(BUGS) >= 12
    for bug in BUGS.values():
        assert bug.scenario in {*SCENARIOS, AGENTS}
        assert bug.invariants


def test_what_a_scenario_hides_is_found_by_the_next() -> None:
    # In a separate process, because the tests' process has threads.
    script = """
        import importlib.util
        from ops.chaos.__main__ import in_fork
        from shared.models.lazy_module import hide_torch
        in_fork(hide_torch)
        assert importlib.util.find_spec("torch") is not None
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
