"""Which tokens are left to draw from, and the drawing; integers, so that nothing is rounded.

min_p, top_k and top_p each come down to the least weight that stays. What is as probable as the
least of those that stay, stays as well. min_p goes first; top_k counts, and top_p weighs, what the
filter before has left.

Weights are counted in units of 2^-40 of the greatest. Sums of integers do not depend on the order
of the summands, so a row gets the same token in any batch.
"""

import math

import torch
from torch import Tensor

UNITS = 2.0**40
"""Of the greatest weight; the sum over a vocabulary of a million is below 2^60."""
MAX_CHUNK = 512
MAX_RANKED = 256
"""Of a large vocabulary so many are found sooner by rank than by counting."""

# A weight is a float32, and none is negative: read as integers, the bits of the greater one are
# greater. They are looked at from the top, so many at a time: a sum for each value that these can
# have is cheap beside a large vocabulary, and dear beside a small one.
NUM_BITS = 31
LARGE_VOCAB = 1 << 14


def weigh(logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities as shares of the greatest, in place of the logits: float32
    [num_rows, vocab_size]. `temperature` [num_rows, 1]."""
    greatest = logits.amax(-1, keepdim=True)
    return logits.sub_(greatest).div_(temperature).exp_()


def keep_probable(weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The weights, in place, with 0 for those that do not stay.

    `min_p`, `top_p` float64 and `top_k` int64, [num_rows, 1]; 0, 1 and the vocabulary's size let
    all stay.
    """
    if bool((min_p > 0).any()):
        _keep_from(weights, min_p.float())
    if bool((top_k < weights.shape[1]).any()):
        _keep_from(weights, _top(weights, top_k))
    if bool((top_p < 1).any()):
        units = (weights * UNITS).long()
        total = units.sum(-1, keepdim=True)
        # A token stays while those before it do not hold top_p of the mass.
        target = (total.double() * top_p).ceil().long().clamp(max=total)
        _keep_from(weights, _least_kept(weights, units, target))
    return weights


def draw(weights: Tensor, points: Tensor) -> Tensor:
    """The token in whose share of the mass the point falls, the shares laid out by token id.

    By id and not by rank: two nearly equal logits may change ranks with the rounding of another
    batch, and with them all shares between. `points` float64 [num_rows] in [0, 1); [num_rows].
    """
    size = chunk_size(weights.shape[1])
    chunks = (weights * UNITS).long().view(len(weights), weights.shape[1] // size, size)
    sums = chunks.sum(-1)
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    place = (total * points[:, None]).long().clamp(max=total - 1)
    chunk = torch.searchsorted(ends, place, right=True)
    place -= (ends - sums).gather(1, chunk)
    within = chunks[torch.arange(len(chunks), device=chunks.device), chunk[:, 0]].cumsum(-1)
    found: Tensor = chunk * size + torch.searchsorted(within, place, right=True)
    return found[:, 0]


def chunk_size(vocab_size: int) -> int:
    """Vocabularies are padded to some power of two; one that is not makes chunks of one token."""
    return math.gcd(vocab_size, MAX_CHUNK)


def _keep_from(weights: Tensor, least: Tensor) -> None:
    # Comparing in place keeps to floats, which is several times as fast as a mask.
    weights.mul_(weights.clone().ge_(least))


def _top(weights: Tensor, top_k: Tensor) -> Tensor:
    """The weight of rank `top_k`: [num_rows, 1]."""
    most = int(top_k.max())
    if most <= MAX_RANKED:
        return weights.topk(most).values.gather(1, top_k - 1)
    one = torch.ones((), dtype=torch.int64, device=weights.device)
    return _least_kept(weights, one.expand_as(weights), top_k)


def _least_kept(weights: Tensor, amounts: Tensor, target: Tensor) -> Tensor:
    """The least weight of which the greater ones have less than `target` in all: [num_rows, 1].

    Sorting a large vocabulary would take twenty times as long.
    """
    bits = weights.view(torch.int32)
    found = torch.zeros_like(target, dtype=torch.int32)
    width = 16 if weights.shape[1] >= LARGE_VOCAB else 8
    num_left = NUM_BITS
    while num_left:
        width = min(width, num_left)
        num_left -= width
        found <<= width
        # 0 for all whose bits so far are less, then one for each value of the next bits, then one
        # for all whose bits so far are greater.
        size = 1 << width
        slots = (bits >> num_left).sub_(found).clamp_(-1, size).add_(1)
        found += _last_reaching(slots, amounts, target, size + 2) - 1
    return found.view(torch.float32)


def _last_reaching(slots: Tensor, amounts: Tensor, target: Tensor, num_slots: int) -> Tensor:
    """The last slot that, with all behind it, has `target` or more: [num_rows, 1]."""
    sums = torch.zeros(len(slots), num_slots, dtype=torch.int64, device=slots.device)
    sums.scatter_add_(1, slots.long(), amounts)
    return num_slots - 1 - torch.searchsorted(sums.flip(1).cumsum(1), target)
