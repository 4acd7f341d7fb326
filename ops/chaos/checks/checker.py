"""The checker: finds the promises that a recorded run has broken, and measures the run.

It is pure and reads neither files nor clocks, so its tests check invented runs.
docs/contribute/reliability.md lists the invariants I1 to I21.
"""

from collections import Counter
from dataclasses import dataclass

from ops.chaos.checks import (
    batches,
    figures,
    http,
    images,
    requests,
    scaling,
    speech,
    system,
    tenants,
)
from ops.chaos.checks.recorded_run import RecordedRun, Violation


@dataclass(frozen=True, slots=True)
class Verdict:
    violations: list[Violation]
    figures: dict[str, float]
    counts: dict[str, Counter[str]]

    @property
    def clean(self) -> bool:
        return not self.violations


def check(run: RecordedRun) -> Verdict:
    """Apply all checks to a run."""
    checks = (requests, http, speech, images, system, scaling, tenants, batches)
    violations = [violation for module in checks for violation in module.find(run)]
    measured = figures.measure(run) | scaling.measure(run)
    return Verdict(sorted(violations), measured, figures.count(run))
