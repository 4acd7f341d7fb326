"""Make the demo's painter: a small diffusion transformer, and a card of how well it paints.

The program draws its own images, and needs no download.

    python -m ops.training.painter train judge

The learning rate follows the CPU time, so that a run always ends well whatever the machine; a run
is therefore seeded but not reproducible to the bit. `--resume` goes on from the last checkpoint,
also with more `--minutes` than before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from ops.training.painter.card import write_card
from ops.training.painter.evaluation import evaluate
from ops.training.painter.saving import SCALE
from ops.training.painter.trainer import SIZE, Settings, Trainer
from ops.training.trainer import MuonState


def arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parents[2] / "demo_painter"
    spare = Path(tempfile.gettempdir()) / "pagemill_demo_painter.pt"
    parser = argparse.ArgumentParser(
        description="Train and judge the demo's painter on drawings made by this program.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("what", nargs="+", choices=("train", "judge"), help="in this order")
    parser.add_argument("--out", type=Path, default=here, help="folder of the painter")
    parser.add_argument("--checkpoint", type=Path, default=spare, help="where to keep progress")
    parser.add_argument("--minutes", type=float, default=60.0, help="CPU time of training")
    parser.add_argument("--seed", type=int, default=0, help="of drawings, batches and weights")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--batch", type=int, default=64, help="images of a step")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--cases", type=int, default=200, help="prompts to judge")
    parser.add_argument("--steps", type=int, default=24, help="denoising steps of judged images")
    parser.add_argument("--guidance", type=float, default=1.5, help="of judged images")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    settings = Settings(args.seed, args.out, args.checkpoint, args.minutes, args.batch)
    if "train" in args.what:
        trainer = Trainer(settings)
        if args.resume:
            trainer.load()
        trainer.run()
    if "judge" in args.what:
        size = SIZE[0] * SCALE, SIZE[1] * SCALE
        painted, drawn = evaluate(args.out, size, args.cases, args.steps, args.guidance, args.seed)
        state = MuonState(**torch.load(args.checkpoint)["state"])
        write_card(args.out, painted, drawn, (args.steps, args.guidance), settings, state)


if __name__ == "__main__":
    main()
