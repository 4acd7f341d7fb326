"""Choice of the codes of further codebooks, which a talker predicts after the first one.

A greedy request gets the most probable code. For any other request, the code is drawn from the 50
most probable codes with 80 % of the mass, as in transformers. A code depends only on the logits,
the seed, the position of the frame and the codebook.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.core.sequence import Sequence
from workers.engine.sampling.ranked import draw_filtered, rank
from workers.engine.sampling.sampler import GREEDY_BELOW, uniform
from workers.engine.sampling.truncation import Filters

TOP_K, TOP_P = 50, 0.8


class FrameCodes(Protocol):
    """Chooses codes for one frame of each sequence."""

    def choose(self, logits: Tensor, codebook: int) -> Tensor:
        """Return a code for each row of logits [num_sequences, num_codes]: int64, on its device.

        The first of the further codebooks has the number 1.
        """


NewFrameCodes = Callable[[list[Sequence], int], FrameCodes]
"""The second argument is the number of codebooks, including the first one."""


class HostFrameCodes:
    """Implements `FrameCodes` on a CPU."""

    def __init__(self, sequences: list[Sequence], num_codebooks: int) -> None:
        self._is_drawn = torch.from_numpy(are_drawn(sequences))
        self._points = torch.from_numpy(points_of(sequences, num_codebooks))

    def choose(self, logits: Tensor, codebook: int) -> Tensor:
        logits = logits.float()
        greedy = logits.argmax(-1)
        if not self._is_drawn.any():
            return greedy

        def column(value: float) -> Tensor:
            return torch.full((len(logits), 1), value, dtype=torch.float64)

        top_k = column(min(TOP_K, logits.shape[1])).long()
        filters = Filters(column(1.0).float(), column(0.0), top_k, column(TOP_P))
        drawn = draw_filtered(logits, rank(logits), filters, self._points[codebook - 1])
        return torch.where(self._is_drawn, drawn, greedy)


def are_drawn(sequences: list[Sequence]) -> NDArray[np.bool_]:
    """Return whether the codes of each sequence are drawn."""
    return np.array([s.request.sampling.temperature >= GREEDY_BELOW for s in sequences], np.bool_)


def points_of(sequences: list[Sequence], num_codebooks: int) -> NDArray[np.float64]:
    """Return the random numbers of the further codes: [num_codebooks - 1, num_sequences].

    The numbers are 0 for greedy sequences.
    """
    rows = list(zip(sequences, are_drawn(sequences), strict=True))
    # A request has one speech, so the number of the choice is free for the number of the codebook.
    return np.array(
        [
            [uniform(s.seed, codebook, s.num_output_tokens) if drawn else 0.0 for s, drawn in rows]
            for codebook in range(1, num_codebooks)
        ]
    )
