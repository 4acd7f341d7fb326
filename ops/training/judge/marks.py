"""Marks of the model that sees, for each kind of question, and its card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import Qwen2VLForConditionalGeneration

from ops.training.card import write_card
from ops.training.judge.answering import Answerer
from ops.training.judge.cases import questions_of

console = Console()

CARD = Path(__file__).with_name("card.md")
# For each row, right answers and questions, by column: seen or unseen wordings.
Marks = dict[str, dict[str, list[int]]]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    goal: int = 90
    goal_unseen: int = 80


ROWS = {
    "plain": Row("colour of a plain picture", 95),
    "colour": Row("colour of a shape", 95),
    "background": Row("colour of the background"),
    "shape": Row("kind of shape (6)", 95),
    "describe": Row("short description"),
    "count": Row("how many shapes (1 to 5)"),
    "character": Row("digit or letter (36)"),
    "where": Row("where a shape is (4 sides)"),
    "same": Row("two pictures of the same colour?"),
    "chat": Row("questions without a picture"),
    "nothing": Row("picture question without a picture"),
    "motion": Row("which way a shape moves in a clip (4 ways)", 95),
    "change": Row("grows or shrinks in a clip", 95),
    "last": Row("colour at the end of a clip", 95),
    "add": Row("sum of two counts, by a tool"),
    "lookup": Row("name behind a character, by a tool"),
    "no call": Row("tools are offered, and not needed"),
}


def judge(model: Path, kinds: Sequence[str], share: float, seed: int, wrong: int) -> Marks:
    """Ask the questions of these kinds, and print at most `wrong` wrong answers of each row."""
    answerer = Answerer(model)
    marks: Marks = {}
    num_printed: dict[str, int] = {}
    for kind in kinds:
        for question in track(list(questions_of(kind, seed, share)), kind, console=console):
            column = "seen" if question.is_seen else "unseen"
            score = marks.setdefault(question.row, {}).setdefault(column, [0, 0])
            right, answer = answerer.judge(question)
            score[0] += right
            score[1] += 1
            if not right and num_printed.get(question.row, 0) < wrong:
                num_printed[question.row] = num_printed.get(question.row, 0) + 1
                console.print(
                    f"{question.row}: {question.text!r}: {answer!r}, not {question.answer!r}"
                )
    return marks


def print_marks(marks: Marks) -> None:
    table = Table("task", "seen wordings", "unseen wordings", "asked")
    for row, columns in marks.items():
        cells = [f"{percent(score):.1f}" for score in columns.values()]
        table.add_row(ROWS[row].name, *cells, str(columns["seen"][1]))
    console.print(table)


def percent(score: list[int]) -> float:
    return 100 * score[0] / score[1]


def write_seeing_card(folder: Path, marks: Marks, before: Marks) -> None:
    """Write the card, with the marks of an older model in brackets."""
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder)
    config: Any = model.config
    lines, missed = [], []
    for name, row in ROWS.items():
        columns = marks[name]
        cells = [row.name]
        for column in ("seen", "unseen"):
            then = f" ({percent(before[name][column]):.0f})" if name in before else ""
            cells.append(f"{percent(columns[column]):.1f} %{then}")
        cells += [str(columns["seen"][1]), f"{row.goal} / {row.goal_unseen} %"]
        lines.append(f"| {' | '.join(cells)} |")
        if percent(columns["seen"]) < row.goal or percent(columns["unseen"]) < row.goal_unseen:
            missed.append(row.name)
    training = ""
    if (notes := folder / "training.json").exists():
        note = json.loads(notes.read_text(encoding="utf-8"))
        training = f"\n## Training\n\nOn a {note['machine']}, {note['start']}:\n\n"
        training += "".join(f"- {phase}\n" for phase in note["phases"])
    write_card(
        folder,
        CARD,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        tower=config.vision_config,
        text=config.text_config,
        rows="\n".join(lines),
        verdict=f"Below what is wanted: {'; '.join(missed)}."
        if missed
        else "Every row is reached.",
        training=training,
    )
