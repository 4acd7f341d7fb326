"""min_p, top_k and top_p truncation and the random draw, in integer arithmetic without rounding.

Each filter reduces to a threshold weight; tokens that tie with the threshold are kept. min_p comes
first. top_k counts, and top_p sums, the tokens left by the previous filter.

A weight is the probability relative to the greatest one, in units of 2^-40. Integer sums do not
depend on the order of the summands, so a row yields the same token in any batch.

This module defines the result over the whole vocabulary. `ranked`, with filters, and `estimates`,
without filters, find the same token with less work.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

UNITS = 2.0**40
"""Integer value of the greatest weight; sums over a million tokens stay below 2^60."""
MAX_EXPONENT = 64.0
"""The exponential function is ten times slower where it underflows, as for tokens that a grammar
forbids. A weight of exp(-64) has no units either, so its token is not drawn."""
MAX_CHUNK = 512


class Filters(NamedTuple):
    """Parameters of each row, [num_rows, 1]. The values 0, vocab_size and 1 keep all tokens."""

    temperature: Tensor
    """float32"""
    min_p: Tensor
    """float64"""
    top_k: Tensor
    """int64"""
    top_p: Tensor
    """float64"""

    def of(self, rows: list[int]) -> "Filters":
        """Return the parameters of the given rows."""
        return Filters(*(column[rows] for column in self))


def unnormalized_probs(logits: Tensor, greatest: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logits - greatest) / temperature), but at least exp(-`MAX_EXPONENT`).

    `logits` are float32 [num_rows, vocab_size], the other two [num_rows, 1].
    """
    return logits.sub(greatest).div_(temperature).clamp_min_(-MAX_EXPONENT).exp_()


def truncate(weights: Tensor, filters: Filters) -> Tensor:
    """Set the weights of truncated tokens to 0, in place: float32 [num_rows, vocab_size]."""
    _, min_p, top_k, top_p = filters
    if bool((min_p > 0).any()):
        _zero_below(weights, min_p.float())
    by_count, by_mass = bool((top_k < weights.shape[1]).any()), bool((top_p < 1).any())
    if not by_count and not by_mass:
        return weights
    ordered = sort_descending(weights)
    if by_count:
        least = ordered.gather(1, top_k - 1)
        _zero_below(weights, least)
        _zero_below(ordered, least)
    if by_mass:
        ends = to_units(ordered).cumsum(-1)
        last = torch.searchsorted(ends, mass_to_keep(ends[:, -1:], top_p))
        _zero_below(weights, ordered.gather(1, last))
    return weights


def to_units(weights: Tensor) -> Tensor:
    return (weights * UNITS).long()


def mass_to_keep(total: Tensor, top_p: Tensor) -> Tensor:
    """Return the units of mass that top_p keeps of `total`, at least: int64 [num_rows, 1].

    A token is kept if the more probable tokens together have less mass than this.
    """
    return (total.double() * top_p).ceil().long().clamp(max=total)


def sort_descending(values: Tensor) -> Tensor:
    """Return the rows of float32 values in descending order."""
    # NumPy sorts with vector instructions: 20 times as fast as PyTorch.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def draw(weights: Tensor, points: Tensor) -> Tensor:
    """Return the token at each point of the mass: int64 [num_rows].

    `points` are float64 [num_rows] in [0, 1). Shares are laid out by token id and not by rank: two
    nearly equal logits may swap ranks with the rounding of another batch, which would move all
    shares between them.
    """
    size = chunk_size(weights.shape[1])
    chunks = to_units(weights).view(len(weights), weights.shape[1] // size, size)
    sums = chunks.sum(-1)
    ends = sums.cumsum(-1)
    offset = point_to_offset(ends[:, -1:], points)
    # Weights that are not finite, which fail their request later, must not leave the vocabulary.
    chunk = torch.searchsorted(ends, offset, right=True).clamp_(max=ends.shape[1] - 1)
    offset -= (ends - sums).gather(1, chunk)
    within = chunks[torch.arange(len(chunks)), chunk[:, 0]].cumsum(-1)
    token_ids: Tensor = chunk * size + torch.searchsorted(within, offset, right=True)
    return token_ids[:, 0].clamp_(max=weights.shape[1] - 1)


def point_to_offset(total: Tensor, points: Tensor) -> Tensor:
    """Return the units of mass before each point: int64 [num_rows, 1], less than `total`."""
    return (total * points[:, None]).long().clamp(max=total - 1)


def chunk_size(vocab_size: int) -> int:
    """Return the greatest power of two, up to `MAX_CHUNK`, that divides the vocabulary's size."""
    return math.gcd(vocab_size, MAX_CHUNK)


def _zero_below(weights: Tensor, threshold: Tensor) -> None:
    # An in-place comparison stays in float32, which is several times faster than a bool mask.
    weights.mul_(weights.clone().ge_(threshold))
