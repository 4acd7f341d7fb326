"""min_p, top_k and top_p truncation and the random draw, in integer arithmetic without rounding.

Each filter reduces to a threshold weight; tokens that tie with the threshold are kept. min_p comes
first. top_k counts, and top_p sums, the tokens that the filter before it has left.

A weight is the probability relative to the greatest one, in units of 2^-40. Integer sums do not
depend on the order of the summands, so a row yields the same token in any batch.
"""

import math

import torch
from torch import Tensor

UNITS = 2.0**40
"""Integer value of the greatest weight; sums over a million tokens stay below 2^60."""
MAX_CHUNK = 512
MAX_RANKED = 256
"""Up to this k, `topk` finds the threshold faster than counting does."""

# Weights are non-negative float32 numbers, so their bit patterns, read as integers, have the same
# order. `_find_threshold` is a radix select over these bits: 16 or 8 bits a pass, depending on the
# size of the vocabulary, because a histogram of 2^16 values is too costly for a small one.
NUM_BITS = 31
LARGE_VOCAB = 1 << 14


def unnormalized_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logits - max) / temperature), computed in place.

    `logits` are float32 [num_rows, vocab_size], `temperature` [num_rows, 1].
    """
    greatest = logits.amax(-1, keepdim=True)
    return logits.sub_(greatest).div_(temperature).exp_()


def truncate(weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set the weights of truncated tokens to 0, in place: float32 [num_rows, vocab_size].

    `min_p` and `top_p` are float64, `top_k` is int64, each [num_rows, 1]. The values 0, 1 and
    vocab_size keep all tokens.
    """
    if bool((min_p > 0).any()):
        _zero_below(weights, min_p.float())
    if bool((top_k < weights.shape[1]).any()):
        _zero_below(weights, _weight_of_rank(weights, top_k))
    if bool((top_p < 1).any()):
        units = (weights * UNITS).long()
        total = units.sum(-1, keepdim=True)
        # A token is kept while more probable ones do not hold top_p of the mass.
        target = (total.double() * top_p).ceil().long().clamp(max=total)
        _zero_below(weights, _find_threshold(weights, units, target))
    return weights


def draw(weights: Tensor, points: Tensor) -> Tensor:
    """Return the token in whose share of the mass each point falls: int64 [num_rows].

    `points` are float64 [num_rows] in [0, 1). Shares are laid out by token id and not by rank: two
    nearly equal logits may swap ranks with the rounding of another batch, which would move all
    shares between them.
    """
    size = chunk_size(weights.shape[1])
    chunks = (weights * UNITS).long().view(len(weights), weights.shape[1] // size, size)
    sums = chunks.sum(-1)
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    offset = (total * points[:, None]).long().clamp(max=total - 1)
    chunk = torch.searchsorted(ends, offset, right=True)
    offset -= (ends - sums).gather(1, chunk)
    within = chunks[torch.arange(len(chunks), device=chunks.device), chunk[:, 0]].cumsum(-1)
    token_ids: Tensor = chunk * size + torch.searchsorted(within, offset, right=True)
    return token_ids[:, 0]


def chunk_size(vocab_size: int) -> int:
    """Return the greatest power of two, up to `MAX_CHUNK`, that divides the vocabulary's size."""
    return math.gcd(vocab_size, MAX_CHUNK)


def _zero_below(weights: Tensor, threshold: Tensor) -> None:
    # An in-place comparison stays in float32, which is several times faster than a bool mask.
    weights.mul_(weights.clone().ge_(threshold))


def _weight_of_rank(weights: Tensor, top_k: Tensor) -> Tensor:
    """Return the weight of rank `top_k` in each row: [num_rows, 1]."""
    max_k = int(top_k.max())
    if max_k <= MAX_RANKED:
        return weights.topk(max_k).values.gather(1, top_k - 1)
    ones = torch.ones((), dtype=torch.int64, device=weights.device)
    return _find_threshold(weights, ones.expand_as(weights), top_k)


def _find_threshold(weights: Tensor, amounts: Tensor, target: Tensor) -> Tensor:
    """Return the least weight whose greater ones sum up to less than `target`: [num_rows, 1].

    `amounts` are the summands, [num_rows, vocab_size]. This is a radix select, some twenty times as
    fast as sorting a large vocabulary.
    """
    bits = weights.view(torch.int32)
    bits_found = torch.zeros_like(target, dtype=torch.int32)
    width = 16 if weights.shape[1] >= LARGE_VOCAB else 8
    num_left = NUM_BITS
    while num_left:
        width = min(width, num_left)
        num_left -= width
        bits_found <<= width
        # Slot 0 is for weights whose leading bits are less than those found, the last slot for
        # greater ones, and the slots between for the values of the next bits.
        size = 1 << width
        slots = (bits >> num_left).sub_(bits_found).clamp_(-1, size).add_(1)
        bits_found += _last_slot_reaching(slots, amounts, target, size + 2) - 1
    return bits_found.view(torch.float32)


def _last_slot_reaching(slots: Tensor, amounts: Tensor, target: Tensor, num_slots: int) -> Tensor:
    """Return the last slot that, with all behind it, sums up to `target` or more: [num_rows, 1]."""
    sums = torch.zeros(len(slots), num_slots, dtype=torch.int64, device=slots.device)
    sums.scatter_add_(1, slots.long(), amounts)
    return num_slots - 1 - torch.searchsorted(sums.flip(1).cumsum(1), target)
