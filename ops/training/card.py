"""Scores of the judges, and the model cards that publish them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Score:
    """Right answers to the questions of one row of a card."""

    name: str
    goal: float | None = None
    """Percentage that the model should reach."""
    num_questions: int = 0
    right: int = 0
    mistakes: list[tuple[str, str]] = field(default_factory=list)
    """Right answers, and the answers that were wrong."""

    @property
    def percent(self) -> float:
        return 100 * self.right / max(1, self.num_questions)

    @property
    def is_missed(self) -> bool:
        return self.goal is not None and self.percent < self.goal

    def add(self, expected: str, answer: str) -> None:
        self.num_questions += 1
        self.right += answer == expected
        if answer != expected:
            self.mistakes.append((expected, answer))

    @property
    def row(self) -> str:
        goal = "-" if self.goal is None else f"{self.goal:.0f} %"
        right = f"{self.right} of {self.num_questions}"
        return f"| {self.name} | {right} | {self.percent:.1f} % | {goal} |"

    def __str__(self) -> str:
        return f"{self.name}: {self.right} of {self.num_questions}; wrong: {self.mistakes[:8]}"


def verdict(scores: Sequence[Score]) -> str:
    missed = [score.name for score in scores if score.is_missed]
    return f"Below the goal: {'; '.join(missed)}." if missed else "All goals are reached."


def write_card(folder: Path, template: Path, **values: object) -> None:
    """Write the README of a model. `{name}` in the template stands for a value."""
    text = template.read_text(encoding="utf-8").format(**values)
    (folder / "README.md").write_text(text, encoding="utf-8")
