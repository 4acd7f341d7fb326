"""Steps that make the painter of the demo, a small diffusion transformer."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ops.training.folders import PAINTER
from ops.training.painter.judging import evaluate, write_painter_card
from ops.training.painter.task import SCALE, SIZE, Painting
from ops.training.trainer import Settings, Trainer, console, stored_state

OUT = PAINTER
MINUTES = 60.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=64, help="images of a step")
    parser.add_argument("--cases", type=int, default=200, help="prompts to judge")
    parser.add_argument("--denoising", type=int, default=24, help="steps of a judged image")
    parser.add_argument("--guidance", type=float, default=1.5, help="guidance of a judged image")


def train(args: Namespace) -> None:
    task = Painting(args.out, args.seed, args.batch)
    Trainer(task, Settings(args.minutes, args.checkpoint, args.clock_minutes)).run(args.resume)


def judge(args: Namespace) -> None:
    size, sampling = (SIZE[0] * SCALE, SIZE[1] * SCALE), (args.denoising, args.guidance)
    scores = evaluate(args.out, size, args.cases, *sampling, args.seed)
    if state := stored_state(args.checkpoint):
        write_painter_card(args.out, scores, sampling, state, args.batch, args.seed)
    else:
        console.log(f"{args.checkpoint} is missing: the card was not written")


STEPS = {"train": train, "judge": judge}
