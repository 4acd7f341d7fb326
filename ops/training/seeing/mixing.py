"""Mixtures of the weights of a model and of its continued trainings.

A mixture keeps the abilities of the first model, and has most of the new ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
Part = tuple[float, Path]


def mixed(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Return the weighted sums of all weights, in half precision."""
    total: dict[str, Tensor] = {}
    for share, folder in parts:
        for name, weight in load_file(folder / WEIGHTS).items():
            total[name] = total.get(name, torch.zeros(())) + share * weight.float()
    return {name: weight.half() for name, weight in total.items()}


def part_of(text: str) -> Part:
    share, _, folder = text.partition(":")
    return float(share), Path(folder)


def write_mixture(out: Path, parts: Sequence[Part]) -> None:
    """Write a mixture of models, otherwise like the last one."""
    weights = mixed(parts)
    shutil.copytree(parts[-1][1], out, dirs_exist_ok=True)
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
