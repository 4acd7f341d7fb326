"""The register of planted bugs, which the modules of bugs fill by a decorator."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """A fault of the product that is planted on purpose."""

    plant: Callable[[], None]
    role: str
    """Workers in which the bug is planted; "any" stands for all roles."""
    scenario: str
    invariants: frozenset[str]
    """Invariants of which the checker must report at least one."""


BUGS: dict[str, Bug] = {}


def bug(
    role: str, scenario: str, *invariants: str, name: str | None = None
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the decorated function, which plants a bug, by default under its own name."""

    def register(plant: Callable[[], None]) -> Callable[[], None]:
        BUGS[name or plant.__name__] = Bug(plant, role, scenario, frozenset(invariants))
        return plant

    return register
