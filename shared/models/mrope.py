"""M-RoPE positions in time, height and width, by the rule that Qwen was trained with.

The tokens of an image or a video stand in a grid, and the text behind it goes on behind its largest
position. transformers 5.23 leaves the time of a video out there, so that its text stands too early.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shared.models.language import PromptPositions
from shared.models.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True, slots=True)
class GridRun:
    """Consecutive tokens of a prompt that stand in a grid, the last axis fastest."""

    offset: int
    frames: int
    rows: int
    columns: int
    step: float = 1.0
    """Positions from one frame to the next; each frame's is rounded down."""

    @property
    def length(self) -> int:
        return self.frames * self.rows * self.columns


def locate_grids(num_tokens: int, runs: Iterable[GridRun]) -> PromptPositions:
    """Return the positions of a prompt with these runs, which are in order and apart."""
    parts = []
    at = position = 0
    for run in runs:
        text = run.offset - at
        parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
        grid = np.indices((run.frames, run.rows, run.columns)).reshape(3, -1)
        grid[0] = (grid[0] * run.step).astype(np.int64)
        parts.append(grid + position + text)
        position = int(parts[-1].max()) + 1
        at = run.offset + run.length
    text = num_tokens - at
    parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
    prompt = torch.from_numpy(np.concatenate(parts, axis=1).astype(np.int64))
    return PromptPositions(prompt, position + text - num_tokens)
