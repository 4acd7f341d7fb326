"""Steps that make the model of the demo that hears.

espeak-ng and SVOX Pico speak the digits of the training, and flite speaks the digits that judge the
model (`apt-get install espeak-ng flite`, `pip install py-nanotts`). The product needs none of them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np

from ops.training.folders import HEARING
from ops.training.hearing.judging import evaluate, write_hearing_card
from ops.training.hearing.speech import record_digits
from ops.training.hearing.task import Hearing, load_state
from ops.training.trainer import Settings, Trainer

OUT = HEARING
MINUTES = 40.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(clock_minutes=120.0)
    parser.add_argument("--first", type=Path, help="folder of a model to continue from")
    parser.add_argument("--batch", type=int, default=48, help="sounds of a step")
    parser.add_argument("--width", type=int, default=128, help="width of all layers")
    parser.add_argument("--layers", type=int, default=3, help="layers of tower and decoder")
    parser.add_argument("--rounds", type=int, default=4, help="recordings of a digit by a voice")


def train(args: Namespace) -> None:
    bank = record_digits(np.random.default_rng(args.seed + 1), args.rounds)
    sizes = (args.batch, args.width, args.layers)
    task = Hearing(bank, args.out, args.seed, *sizes, args.first)
    Trainer(task, Settings(args.minutes, args.checkpoint, args.clock_minutes)).run(args.resume)


def judge(args: Namespace) -> None:
    bank = record_digits(np.random.default_rng(args.seed + 2), 1)
    scores = evaluate(args.out, bank, args.seed)
    sizes = (args.layers, args.width, args.batch)
    write_hearing_card(args.out, scores, *sizes, load_state(args.out))


STEPS = {"train": train, "judge": judge}
