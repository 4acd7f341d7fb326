"""A cell of the fault matrix."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ops.chaos.matrix.deployment import Disturb


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: `run` injects the fault; without it `why_not` says why the cell cannot run."""

    name: str
    how: str
    bound: str = ""
    run: Disturb | None = None
    why_not: str = ""
    needs: Callable[[], str | None] = lambda: None
    on: str = "single"
    load_s: float = 6.0
    change: dict[str, Any] = field(default_factory=dict)
    """Changes of the load's settings."""
    known: str = ""
    """A documented limit that explains a violation."""

    @property
    def reason(self) -> str | None:
        return self.why_not or self.needs()
