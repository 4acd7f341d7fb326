"""Train Pagemill's demo model: a very small Qwen2-VL that answers questions about simple pictures.

The program draws its own pictures, writes its own questions, and needs no download. It runs in two
phases, because a model of this size learns nothing spatial when it is trained end to end from
random weights: first the vision tower alone under plain classification heads, then the tower (at a
fifth of the rate) and the text model together on questions and answers.

    python -m ops.training.seeing

`--first FOLDER` begins the second phase with the weights of an existing model. The learning rate
follows the time that the processor computed, so that a run ends well whatever the machine; a run is
therefore seeded but not reproducible to the bit. It falls in the last part alone: `--resume` goes
on from the last checkpoint, with more `--minutes` at the full rate again. On a CPU that also does
other work, OMP_WAIT_POLICY=PASSIVE keeps torch's threads from spinning while they wait.

`python -m ops.training.judge` judges the result by its own drawings and questions, and writes the
card.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch

from ops.training.seeing.evaluation import check
from ops.training.seeing.trainer import Settings, Trainer


def arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parents[2]
    spare = Path(tempfile.gettempdir()) / "pagemill_demo_model.pt"
    parser = argparse.ArgumentParser(
        description="Train the demo model on pictures drawn by this program.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=here / "demo_model", help="folder to write")
    parser.add_argument("--minutes", type=float, default=58.0, help="of the processor, both phases")
    parser.add_argument("--first", type=Path, help="folder of a model to go on from")
    parser.add_argument(
        "--tower-share", type=float, default=0.45, help="part of the time for the tower alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="of pictures, questions and weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--batch", type=int, default=0, help="samples a step; 0 fits the device")
    parser.add_argument(
        "--workers", type=int, default=0, help="drawing processes; 0 fits the machine"
    )
    parser.add_argument("--threads", type=int, default=0, help="of torch on the CPU; 0 for all")
    parser.add_argument("--checkpoint", type=Path, default=spare, help="where to keep progress")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument(
        "--check", action="store_true", help="only compare the fast paths with transformers"
    )
    return parser.parse_args()


def settings_from(args: argparse.Namespace) -> Settings:
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = device == "cpu"
    if args.threads:
        torch.set_num_threads(args.threads)
    # On a CPU the drawing competes with the training; one process is enough for it there.
    spare = 1 if on_cpu else max(1, (os.cpu_count() or 2) - 1)
    return Settings(
        device=torch.device(device),
        seed=args.seed,
        out=args.out,
        checkpoint=args.checkpoint,
        minutes=args.minutes,
        tower_share=args.tower_share,
        workers=args.workers or spare,
        batch=args.batch or (64 if on_cpu else 512),
        first=args.first,
    )


def main() -> None:
    args = arguments()
    if args.check:
        check(args.first or args.out)
        return
    trainer = Trainer(settings_from(args))
    if args.resume:
        trainer.load()
    trainer.run()


if __name__ == "__main__":
    main()
