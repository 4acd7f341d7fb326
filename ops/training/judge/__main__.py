"""Judge the demo model with drawings, clips and questions that its training has no part in.

    python -m ops.training.judge --before OLDER_FOLDER

asks a model some hundreds of questions, each in a form that the training has too and in one that it
never has, and writes the marks into the model's card beside those of an older model.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ops.training.judge.answering import Answerer
from ops.training.judge.card import ROWS, Marks, write_card
from ops.training.judge.cases import MAKERS, asked

console = Console()


@dataclass(slots=True)
class Options:
    model: Path
    before: Path | None
    kinds: list[str]
    share: float
    seed: int
    threads: int
    wrong: int


def arguments() -> Options:
    here = Path(__file__).resolve().parents[2] / "demo_model"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=here, help="folder to judge")
    parser.add_argument("--before", type=Path, help="marks.json of an older model, for the card")
    parser.add_argument("--kinds", nargs="*", default=list(MAKERS), help="of cases")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases")
    parser.add_argument("--seed", type=int, default=0, help="of drawings and questions")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to show, a row")
    return Options(**vars(parser.parse_args()))


def judge(options: Options) -> Marks:
    answerer = Answerer(options.model)
    marks: Marks = {}
    shown: dict[str, int] = {}
    for kind in options.kinds:
        for one in track(list(asked(kind, options.seed, options.share)), kind, console=console):
            column = "seen" if one.seen else "unseen"
            score = marks.setdefault(one.row, {}).setdefault(column, [0, 0])
            right, said = answerer.judge(one)
            score[0] += right
            score[1] += 1
            if not right and shown.get(one.row, 0) < options.wrong:
                shown[one.row] = shown.get(one.row, 0) + 1
                console.print(f"{one.row}: {one.question!r}: {said!r}, not {one.answer!r}")
    return marks


def show(marks: Marks) -> None:
    table = Table("task", "seen wordings", "unseen wordings", "asked")
    for row, columns in marks.items():
        cells = [f"{100 * right / num:.1f}" for right, num in columns.values()]
        table.add_row(ROWS[row].name, *cells, str(columns["seen"][1]))
    console.print(table)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    marks = judge(options)
    show(marks)
    (options.model / "marks.json").write_text(json.dumps(marks, indent=1) + "\n", encoding="utf-8")
    if options.share == 1.0 and set(options.kinds) == set(MAKERS):
        before = json.loads(options.before.read_text()) if options.before else {}
        write_card(options.model, marks, before)


if __name__ == "__main__":
    main()
