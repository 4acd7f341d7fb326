"""Estimated sums of weights with a known error, in less than half of the time of exact sums.

A sampler needs the sums to choose a token. If every value within the error leads to the same token,
the exact sums lead to it too.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engine.sampling.row_chunks import iterate_chunks, take_rows
from workers.engine.sampling.truncation import MAX_EXPONENT, UNITS, draw, unnormalized_probs

GROUP_SIZE = 32
FLOAT_ERROR = 2.0**-24
"""Relative error of one operation in float32."""
ROUNDING = 2.0**8
"""Limit on the rounding error of float64, in units, for sums below 2^60 and their products."""


class Estimate(NamedTuple):
    """Estimated weights of the tokens of each row, and their sums in the units of `truncation`."""

    weights: Tensor
    """float32 [num_rows, vocab_size]"""
    ends: Tensor
    """Sums up to the end of each group of `GROUP_SIZE` tokens: float64 [num_rows, num_groups]."""
    error: Tensor
    """Limit on the error of the sum of any number of first tokens: float64 [num_rows, 1]."""


def estimate(logits: Tensor, greatest: Tensor, temperature: Tensor) -> Estimate:
    """Estimate `unnormalized_probs`; the arguments are the same."""
    num_rows, vocab_size = logits.shape
    # PyTorch's powers of two take a quarter of the time of `exp`, and are less exact.
    scale = (math.log2(math.e) / temperature.double()).float()
    weights = logits.sub(greatest).mul_(scale).clamp_min_(-MAX_EXPONENT).exp2_()
    num_grouped = vocab_size - vocab_size % GROUP_SIZE
    groups = weights[:, :num_grouped].view(num_rows, num_grouped // GROUP_SIZE, GROUP_SIZE)
    last = weights[:, num_grouped:].sum(1, keepdim=True)
    ends = UNITS * torch.cat([groups.sum(2), last], 1).double().cumsum(-1)
    # Exact sums have units that are rounded down. The exponents differ by three roundings from the
    # exact exponents, and the mean exponent by mass is at most the entropy.
    powers = 2 + 3 * math.log(vocab_size)
    error = vocab_size + ends[:, -1:] * ((GROUP_SIZE + powers) * FLOAT_ERROR)
    return Estimate(weights, ends, error)


def draw_unfiltered(
    logits: Tensor, greatest: Tensor, temperature: Tensor, points: Tensor
) -> Tensor:
    """Return the tokens that `truncation.draw` chooses among all: int64 [num_rows].

    For the first three arguments see `unnormalized_probs`; all rows must be finite.
    `points` are float64 [num_rows] in [0, 1).
    """
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    is_certain = torch.empty(len(logits), dtype=torch.bool)
    for chunk in iterate_chunks(list(range(len(logits))), logits):
        estimated = estimate(take_rows(logits, chunk), greatest[chunk], temperature[chunk])
        token_ids[chunk], is_certain[chunk] = _draw(estimated, points[chunk])
    uncertain: list[int] = (~is_certain).nonzero()[:, 0].tolist()
    for chunk in iterate_chunks(uncertain, logits):
        weights = unnormalized_probs(take_rows(logits, chunk), greatest[chunk], temperature[chunk])
        token_ids[chunk] = draw(weights, points[chunk])
    return token_ids


def _draw(estimated: Estimate, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token of each row, and whether it is certain to be exact: both [num_rows]."""
    weights, ends, error = estimated
    last_group, last_token = ends.shape[1] - 1, weights.shape[1] - 1
    offset = ends[:, -1:] * points[:, None]
    group = torch.searchsorted(ends, offset, right=True).clamp(max=last_group)
    before = ends.gather(1, (group - 1).clamp(min=0)).masked_fill(group == 0, 0)
    within = torch.arange(GROUP_SIZE)
    token_ids = (group * GROUP_SIZE + within).clamp(max=last_token)
    token_ends = before + UNITS * weights.gather(1, token_ids).double().cumsum(-1)
    place = torch.searchsorted(token_ends, offset, right=True).clamp(max=GROUP_SIZE - 1)
    starts = torch.cat([before, token_ends], 1)
    # The offset has an error, and so have the ends of the token.
    margin = 2 * error + ROUNDING
    is_certain = (offset - starts.gather(1, place) > margin) & (
        token_ends.gather(1, place) - offset > margin
    )
    return token_ids.gather(1, place)[:, 0], is_certain[:, 0]
