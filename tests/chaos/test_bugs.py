"""The checker finds bugs that are planted on purpose.

A harness that has never found anything may be unable to.

Each scenario runs the whole system for 15 to 60 s. Two are part of every test run; `make
chaos-bugs` runs them all, and first each scenario without a bug.
"""

import pytest

from ops.chaos.bugs import catalog
from ops.chaos.bugs.registry import BUGS
from ops.chaos.bugs.scenarios import SCENARIOS
from ops.chaos.scenario import run_scenario

QUICK = ("final_record_twice", "no_fencing")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", QUICK)
async def test_a_planted_bug_is_found(name: str) -> None:
    verdict, folder = await run_scenario(catalog.settings_of(name))
    found = {violation.invariant for violation in verdict.violations}
    assert found & BUGS[name].invariants, f"{found or 'nothing'} found; see {folder}"


def test_every_bug_has_a_scenario_and_an_invariant() -> None:
    assert len(BUGS) >= 12
    for bug in BUGS.values():
        assert bug.scenario in SCENARIOS
        assert bug.invariants
