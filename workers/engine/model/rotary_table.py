"""Table of rotary angles: the module of transformers takes many operations for each step."""

from typing import Any

import torch
from torch import Tensor

FIRST_LEN = 1024


class RotaryTable:
    """Cosines and sines by position in float32. The table grows with the positions in use."""

    def __init__(self, module: Any, num_axes: int) -> None:
        """The angles of `module` must depend on the positions alone, which are integers."""
        self._module = module
        self._num_axes = num_axes
        self._like = torch.empty(0, dtype=torch.float32)
        self._axes = find_axes(module, num_axes, self._like)
        self._cos, self._sin = self._tabulate(FIRST_LEN)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [num_tokens, head_dim] of positions [num_axes, num_tokens]."""
        largest = int(positions.max())
        if largest >= len(self._cos):
            self._cos, self._sin = self._tabulate(1 << largest.bit_length())
        if self._num_axes == 1:
            return self._cos.index_select(0, positions[0]), self._sin.index_select(0, positions[0])
        rows = positions.index_select(0, self._axes).T
        return self._cos.gather(0, rows), self._sin.gather(0, rows)

    def _tabulate(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length)[None]
        if self._num_axes > 1:
            positions = positions.expand(self._num_axes, 1, -1)
        cos, sin = self._module(self._like, positions)
        return cos[0].contiguous(), sin[0].contiguous()


def find_axes(module: Any, num_axes: int, like: Tensor) -> Tensor:
    """Return the row of the positions that each value of a head is rotated by, [head_dim] int64."""
    width = 2 * len(module.inv_freq)
    axes = torch.zeros(width, dtype=torch.int64, device=like.device)
    for axis in range(1, num_axes):
        # Only this axis is at position 1: the values with a nonzero sine rotate by it.
        probe = torch.zeros(num_axes, 1, 1, dtype=torch.int64, device=like.device)
        probe[axis] = 1
        axes[module(like, probe)[1][0, 0] != 0] = axis
    return axes
