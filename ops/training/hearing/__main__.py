"""Make the demo's model that hears, and a card of how well it does.

espeak-ng and SVOX Pico speak the digits of the training, and flite those that judge the model
(`apt-get install espeak-ng flite`, `pip install py-nanotts`). The product needs none of them.

    python -m ops.training.hearing train judge

The learning rate follows the clock, so that a run always ends well whatever the machine; a run is
therefore seeded but not reproducible to the bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np
import torch

from ops.training.hearing.card import write_card
from ops.training.hearing.evaluation import evaluate
from ops.training.hearing.speech import record_digits
from ops.training.hearing.trainer import STATE_FILE, Settings, State, Trainer


def arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parents[2] / "demo_hearing"
    parser = argparse.ArgumentParser(
        description="Train and judge the demo's model that hears.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("what", nargs="+", choices=("train", "judge"), help="in this order")
    parser.add_argument("--out", type=Path, default=here, help="folder of the model")
    parser.add_argument("--first", type=Path, help="folder of a model to go on from")
    parser.add_argument("--cpu-minutes", type=float, default=40.0, help="processor time")
    parser.add_argument("--minutes", type=float, default=120.0, help="time by the clock")
    parser.add_argument("--seed", type=int, default=0, help="of sounds and weights")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--batch", type=int, default=48, help="sounds of a step")
    parser.add_argument("--width", type=int, default=128, help="of all layers")
    parser.add_argument("--layers", type=int, default=3, help="of the tower and of the decoder")
    parser.add_argument("--rounds", type=int, default=4, help="recordings of a digit by a voice")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    settings = Settings(
        args.seed,
        args.out,
        args.cpu_minutes,
        args.minutes,
        args.batch,
        args.width,
        args.layers,
        args.first,
    )
    if "train" in args.what:
        bank = record_digits(np.random.default_rng(args.seed + 1), args.rounds)
        Trainer(settings, bank).run()
    if "judge" in args.what:
        own = record_digits(np.random.default_rng(args.seed + 2), 1)
        scores = evaluate(args.out, own, args.seed)
        state = msgspec.json.decode((args.out / STATE_FILE).read_bytes(), type=State)
        write_card(args.out, scores, settings, state)


if __name__ == "__main__":
    main()
