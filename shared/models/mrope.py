"""M-RoPE positions in time, height and width, by the rule that Qwen was trained with.

The tokens of an image or a video form a grid, and the text after it continues after the grid's
largest position. transformers 5.23 ignores the time of a video there, so its text comes too early.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.models.language import PromptPositions
from shared.models.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


Positions = NDArray[np.int64] | NDArray[np.float32]
"""Rotary positions. They have fractions in models that do not round the times of frames."""


class Run(Protocol):
    """Consecutive tokens of a prompt with special positions."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...

    def positions(self) -> tuple[Positions, float]:
        """Return the positions [3, length], and the position of the next token.

        Position 0 is the position after the previous token.
        """
        ...


@dataclass(frozen=True, slots=True)
class GridRun:
    """Consecutive tokens of a prompt that form a grid; the last axis changes fastest."""

    offset: int
    frames: int
    rows: int
    columns: int
    step: float = 1.0
    """Positions from one frame to the next. The position of each frame is rounded down."""

    @property
    def length(self) -> int:
        return self.frames * self.rows * self.columns

    def positions(self) -> tuple[NDArray[np.int64], int]:
        grid = grid_positions(self.frames, self.rows, self.columns, self.step)
        return grid, int(grid.max()) + 1


@dataclass(frozen=True, slots=True)
class TimedRun:
    """Consecutive tokens of a prompt that form a grid. The times of its frames have fractions."""

    offset: int
    times: NDArray[np.float32]
    rows: int
    columns: int

    @property
    def length(self) -> int:
        return len(self.times) * self.rows * self.columns

    def positions(self) -> tuple[NDArray[np.float32], float]:
        grid = timed_positions(self.times, self.rows, self.columns)
        return grid, float(grid.max()) + 1


def timed_positions(times: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """Return the positions of a grid with these times, [3, len(times) * rows * columns]."""
    grid = np.indices((len(times), rows, columns), np.float32).reshape(3, -1)
    grid[0] = np.repeat(times, rows * columns)
    return grid


def grid_positions(frames: int, rows: int, columns: int, step: float) -> NDArray[np.int64]:
    """Return the positions of a grid, [3, frames * rows * columns], from 0 on."""
    grid = np.indices((frames, rows, columns)).reshape(3, -1)
    grid[0] = (grid[0] * step).astype(np.int64)
    return grid


def locate_grids(num_tokens: int, runs: Iterable[Run]) -> PromptPositions:
    """Return the positions of a prompt with these runs, which are in order and do not overlap."""
    parts = []
    at: int = 0
    position: float = 0
    for run in runs:
        parts.append(_count_on(position, run.offset - at))
        begin = position + run.offset - at
        places, num_positions = run.positions()
        # A mark shares the position of the previous token, but may be the prompt's first token.
        parts.append(np.maximum(places + begin, 0))
        position = begin + num_positions
        at = run.offset + run.length
    parts.append(_count_on(position, num_tokens - at))
    prompt = torch.from_numpy(np.concatenate(parts, axis=1))
    return PromptPositions(prompt, prompt.max().item() + 1 - num_tokens)


def _count_on(position: float, num: int) -> NDArray[Any]:
    """Return the positions of `num` tokens of text."""
    return np.broadcast_to(position + np.arange(num), (3, num))
