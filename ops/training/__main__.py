"""Train and judge the models of the demo.

    python -m ops.training voice record codec train judge

runs steps of one model in this order: `train` makes the model, and `judge` measures it and writes
its card. The programs draw, record and word their own examples, and download nothing.

The rates follow the time that the processor computed, so that a run ends well on any machine. It is
seeded, but not reproducible to the bit. `--resume` continues from the last checkpoint, also with
more `--minutes`.
"""

from __future__ import annotations

import math
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch

from ops.training.hearing import command as hearing
from ops.training.painter import command as painter
from ops.training.seeing import command as seeing
from ops.training.voice import command as voice

MODELS = {"seeing": seeing, "hearing": hearing, "voice": voice, "painter": painter}


def arguments() -> Namespace:
    parser = ArgumentParser(
        prog="python -m ops.training", description="Train and judge the models of the demo."
    )
    models = parser.add_subparsers(dest="model", required=True)
    for name, model in MODELS.items():
        summary = (model.__doc__ or "").splitlines()[0]
        own = models.add_parser(
            name, help=summary, description=summary, formatter_class=ArgumentDefaultsHelpFormatter
        )
        spare = Path(tempfile.gettempdir()) / "pagemill_training" / name
        own.add_argument("steps", nargs="+", choices=model.STEPS, help="steps, in this order")
        own.add_argument("--out", type=Path, default=model.OUT, help="folder of the model")
        own.add_argument("--spare", type=Path, default=spare, help="folder of the checkpoint")
        own.add_argument("--minutes", type=float, default=model.MINUTES, help="processor time")
        own.add_argument(
            "--clock-minutes", type=float, default=math.inf, help="time by the clock, a limit too"
        )
        own.add_argument("--seed", type=int, default=0, help="seed of examples and weights")
        own.add_argument("--threads", type=int, default=1, help="threads of torch")
        own.add_argument("--resume", action="store_true", help="continue from the checkpoint")
        model.add_arguments(own)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.checkpoint = args.spare / "checkpoint.pt"
    if args.threads:
        torch.set_num_threads(args.threads)
    for step in args.steps:
        MODELS[args.model].STEPS[step](args)


if __name__ == "__main__":
    main()
