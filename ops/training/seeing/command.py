"""Steps that make the model of the demo that sees, a very small Qwen2-VL.

`--first FOLDER` begins the second phase with the weights of an existing model. On a CPU that also
does other work, OMP_WAIT_POLICY=PASSIVE keeps torch's threads from spinning while they wait.

`check` compares the fast paths of the training with transformers, and `mix` writes a mixture of the
weights of several models. `judge` uses its own drawings and questions, and writes the card.
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from ops.training.folders import SEEING
from ops.training.judge import marks
from ops.training.judge.cases import MAKERS
from ops.training.seeing.evaluation import check as check_folder
from ops.training.seeing.mixing import part_of, write_mixture
from ops.training.seeing.task import Chat, Plan, Tower, first_model
from ops.training.trainer import Settings, Trainer, stored_state

OUT = SEEING
MINUTES = 58.0


def add_arguments(parser: ArgumentParser) -> None:
    # 0 threads are as many as torch takes by itself.
    parser.set_defaults(threads=0)
    parser.add_argument("--first", type=Path, help="folder of a model to continue from")
    parser.add_argument("--tower-share", type=float, default=0.45, help="time for the tower alone")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--batch", type=int, default=0, help="samples a step; 0 fits the device")
    parser.add_argument("--workers", type=int, default=0, help="drawing processes; 0 fits as well")
    parser.add_argument("--parts", type=part_of, nargs="+", help="SHARE:FOLDER of a mixture")
    parser.add_argument("--before", type=Path, help="marks.json of an older model, for the card")
    parser.add_argument("--kinds", nargs="*", default=list(MAKERS), help="kinds of judged cases")
    parser.add_argument("--share", type=float, default=1.0, help="share of the judged cases")
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print, a row")


def train(args: Namespace) -> None:
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = device == "cpu"
    # On a CPU the drawing competes with the training; one process is enough for it there.
    workers = args.workers or (1 if on_cpu else max(1, (os.cpu_count() or 2) - 1))
    batch = args.batch or (64 if on_cpu else 512)
    plan = Plan(args.out, torch.device(device), args.seed, batch, workers, args.first)
    tower_file, chat_file = args.checkpoint.with_name("tower.pt"), args.checkpoint
    if not args.resume:
        tower_file.unlink(missing_ok=True)
        chat_file.unlink(missing_ok=True)
    model = first_model(plan)

    def settings(share: float, checkpoint: Path) -> Settings:
        return Settings(share * args.minutes, checkpoint, share * args.clock_minutes)

    if args.first is None and not chat_file.exists():
        tower = Trainer(Tower(plan, model), settings(args.tower_share, tower_file))
        tower.run(tower_file.exists())
    task = Chat(plan, model, stored_state(tower_file))
    Trainer(task, settings(1 - args.tower_share, chat_file)).run(chat_file.exists())


def check(args: Namespace) -> None:
    check_folder(args.first or args.out)


def mix(args: Namespace) -> None:
    write_mixture(args.out, args.parts)


def judge(args: Namespace) -> None:
    scores = marks.judge(args.out, args.kinds, args.share, args.seed, args.wrong)
    marks.print_marks(scores)
    if args.share == 1.0 and set(args.kinds) == set(MAKERS):
        text = json.dumps(scores, indent=1) + "\n"
        (args.out / "marks.json").write_text(text, encoding="utf-8")
        before = json.loads(args.before.read_text(encoding="utf-8")) if args.before else {}
        marks.write_seeing_card(args.out, scores, before)


STEPS = {"train": train, "check": check, "mix": mix, "judge": judge}
