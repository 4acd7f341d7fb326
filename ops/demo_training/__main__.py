"""Train Pagemill's demo model: a very small Qwen2-VL that answers questions about simple pictures.

The program draws its own pictures, writes its own questions, and needs no download. It runs in two
phases, because a model of this size learns nothing spatial when it is trained end to end from
random weights: first the vision tower alone under plain classification heads, then the tower (at a
fifth of the rate) and the text model together on questions and answers.

    python -m ops.demo_training

The learning rate follows the clock, so that a run always ends well whatever the machine; a run is
therefore seeded but not reproducible to the bit. `--resume` goes on from the last checkpoint. On a
CPU that also does other work, OMP_WAIT_POLICY=PASSIVE keeps torch's threads from spinning while
they wait.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from rich.table import Table

from ops.demo_training.card import training_note, write_card
from ops.demo_training.evaluation import ROW_NAMES, Score, check, evaluate
from ops.demo_training.scenes import console
from ops.demo_training.trainer import Settings, Trainer


def arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parent.parent
    spare = Path(tempfile.gettempdir()) / "pagemill_demo_model.pt"
    parser = argparse.ArgumentParser(
        description="Train and evaluate the demo model on pictures drawn by this program.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=here / "demo_model", help="folder to write")
    parser.add_argument("--minutes", type=float, default=58.0, help="training time, both phases")
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
        "--cases", type=int, default=120, help="held-out cases of each task in the evaluation"
    )
    parser.add_argument(
        "--evaluate-only", action="store_true", help="evaluate --out and rewrite its model card"
    )
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
        batch=args.batch or (128 if on_cpu else 512),
    )


def show(scores: dict[str, Score]) -> None:
    table = Table("task", "exact", "mark")
    for name, score in scores.items():
        table.add_row(ROW_NAMES[name], f"{score.percent:.1f} %", score.wanted)
    console.print(table)


def main() -> None:
    args = arguments()
    if args.check:
        check(args.seed)
        return
    settings = settings_from(args)
    trainer = Trainer(settings)
    if args.resume or args.evaluate_only:
        trainer.load()
    if not args.evaluate_only:
        trainer.run()
    scores = evaluate(settings.out, settings.seed, args.cases)
    show(scores)
    write_card(settings.out, scores, training_note(settings, trainer.state))


if __name__ == "__main__":
    main()
