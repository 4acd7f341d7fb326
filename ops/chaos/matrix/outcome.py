"""Result of a cell of the fault matrix."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Violations, from the cell and from the checker of its system, and figures."""

    violations: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def note_largest(self, name: str, value: float) -> None:
        self.figures[name] = max(value, self.figures.get(name, 0.0))
