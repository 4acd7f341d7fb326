"""Mix the weights of a model and of those that went on from it.

Between the two lies a model that keeps what the first one knew and has learnt most of the rest.

    python -m ops.training.seeing.mixing OUT 0.25:FIRST 0.375:SECOND 0.375:THIRD
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
Part = tuple[float, Path]


def mixed(parts: Sequence[Part]) -> dict[str, Tensor]:
    """The weighted sums of all weights, in half precision."""
    total: dict[str, Tensor] = {}
    for share, folder in parts:
        for name, weight in load_file(folder / WEIGHTS).items():
            total[name] = total.get(name, torch.zeros(())) + share * weight.float()
    return {name: weight.half() for name, weight in total.items()}


def part_of(text: str) -> Part:
    share, _, folder = text.partition(":")
    return float(share), Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mix the weights of models.")
    parser.add_argument("out", type=Path, help="folder to write, otherwise like the last one")
    parser.add_argument("parts", type=part_of, nargs="+", help="SHARE:FOLDER")
    args = parser.parse_args()
    weights = mixed(args.parts)
    shutil.copytree(args.parts[-1][1], args.out, dirs_exist_ok=True)
    save_file(weights, args.out / WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
