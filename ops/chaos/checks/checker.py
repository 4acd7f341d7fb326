"""From the recorded history of a run: which promises were broken, and how long things took.

Pure: it reads neither files nor clocks, and a run that nobody has run can be checked as well, which
is how it is tested. The invariants I1 to I14 are those of the design's reliability page.
"""

from collections import Counter
from dataclasses import dataclass

from ops.chaos.checks import figures, http, requests, system
from ops.chaos.checks.recorded_run import Run
from ops.chaos.checks.violation import Violation


@dataclass(frozen=True, slots=True)
class Verdict:
    violations: list[Violation]
    figures: dict[str, float]
    counts: dict[str, Counter[str]]

    @property
    def clean(self) -> bool:
        return not self.violations


def check(run: Run) -> Verdict:
    checks = (requests, http, system)
    found = [violation for module in checks for violation in module.find(run)]
    return Verdict(sorted(found), figures.measure(run), figures.count(run))
