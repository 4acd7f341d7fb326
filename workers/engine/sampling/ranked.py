"""The draw of `truncation` on a CPU, from the most probable tokens alone where these decide it.

If a filter leaves only ranked tokens, no other token matters. top_p alone needs the mass of the
whole vocabulary, but bounds on it suffice: if both bounds lead to the same threshold, the threshold
is exact. Rows that the ranked tokens do not decide are truncated over the whole vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.engine.sampling.estimates import estimate
from workers.engine.sampling.row_chunks import iterate_chunks, take_rows
from workers.engine.sampling.truncation import (
    Filters,
    draw,
    mass_to_keep,
    point_to_offset,
    to_units,
    truncate,
    unnormalized_probs,
)

NUM_RANKED = 256
GROUP_SIZE = 32


class Ranked(NamedTuple):
    """The greatest logits of each row in descending order, and their tokens: [num_rows, num]."""

    logits: Tensor
    token_ids: Tensor


def rank(logits: Tensor) -> Ranked:
    """Return the `NUM_RANKED` greatest logits of each row, or all of them if there are fewer.

    A NaN counts as the greatest.
    """
    num_rows, vocab_size = logits.shape
    num_groups = vocab_size // GROUP_SIZE
    if num_groups > NUM_RANKED:
        # The greatest logits, or equal ones, are in the groups with the greatest maxima.
        groups = logits[:, : num_groups * GROUP_SIZE].view(num_rows, num_groups, -1)
        maxima = groups.amax(2)
        chosen = _find_greatest(maxima)
        offsets = torch.arange(GROUP_SIZE)
        token_ids = (chosen[:, :, None] * GROUP_SIZE + offsets).flatten(1)
        ungrouped = torch.arange(num_groups * GROUP_SIZE, vocab_size)
        token_ids = torch.cat([token_ids, ungrouped.expand(num_rows, -1)], 1)
        candidates = logits.gather(1, token_ids)
        # Each chosen group has a logit at its maximum, so `NUM_RANKED` logits reach the least of
        # the maxima.
        least = maxima.gather(1, chosen).amin(1)
        candidates, token_ids = _drop_below(least, candidates, token_ids)
    else:
        token_ids = torch.arange(vocab_size).expand(num_rows, -1)
        candidates = logits
    greatest = _find_greatest(candidates)
    candidates = candidates.gather(1, greatest)
    order = _argsort(candidates).flip(-1)
    return Ranked(candidates.gather(1, order), token_ids.gather(1, greatest.gather(1, order)))


def draw_filtered(logits: Tensor, ranked: Ranked, filters: Filters, points: Tensor) -> Tensor:
    """Return the tokens that `truncate` and `draw` choose: int64 [num_rows].

    `logits` are finite float32 [num_rows, vocab_size], `points` float64 [num_rows] in [0, 1).
    """
    vocab_size, greatest = logits.shape[1], ranked.logits[:, :1]
    weights = unnormalized_probs(ranked.logits, greatest, filters.temperature)
    num_ranked, last_weight = weights.shape[1], weights[:, -1:]
    units = to_units(weights)
    by_count = weights.gather(1, filters.top_k.clamp(max=num_ranked) - 1)
    by_count.masked_fill_(filters.top_k > num_ranked, 0)
    least = torch.maximum(filters.min_p.float(), by_count)
    # True if all other tokens are truncated or have no mass.
    holds_all = (least > last_weight) | (units[:, -1:] == 0) | (num_ranked == vocab_size)
    ends = units.masked_fill(weights < least, 0).cumsum(-1)
    low, high = ends[:, -1:].clone(), ends[:, -1:].clone()
    filters_by_mass_only = (filters.min_p == 0) & (filters.top_k >= vocab_size)
    is_open = ~holds_all & filters_by_mass_only & (filters.top_p < 1)
    for chunk in iterate_chunks(_true_rows(is_open), logits):
        _, sums, error = estimate(
            take_rows(logits, chunk), greatest[chunk], filters.temperature[chunk]
        )
        low[chunk], high[chunk] = (sums[:, -1:] - error).long(), (sums[:, -1:] + error).long()
    first, last = (torch.searchsorted(ends, mass_to_keep(m, filters.top_p)) for m in (low, high))
    by_mass = weights.gather(1, first.clamp(max=num_ranked - 1))
    is_decided = holds_all | is_open & (first == last) & (by_mass > last_weight)
    units.masked_fill_(weights < torch.maximum(least, by_mass), 0)
    token_ids = _draw(units, ranked.token_ids, points)
    for chunk in iterate_chunks(_true_rows(~is_decided), logits):
        whole = unnormalized_probs(
            take_rows(logits, chunk), greatest[chunk], filters.temperature[chunk]
        )
        token_ids[chunk] = draw(truncate(whole, filters.of(chunk)), points[chunk])
    return token_ids


def _true_rows(column: Tensor) -> list[int]:
    rows: list[int] = column[:, 0].nonzero()[:, 0].tolist()
    return rows


def _draw(units: Tensor, token_ids: Tensor, points: Tensor) -> Tensor:
    """Draw as `truncation.draw` does, from the units of these tokens."""
    order = _argsort(token_ids)
    ends = units.gather(1, order).cumsum(-1)
    offset = point_to_offset(ends[:, -1:], points)
    drawn = torch.searchsorted(ends, offset, right=True)
    return token_ids.gather(1, order.gather(1, drawn))[:, 0]


def _find_greatest(values: Tensor) -> Tensor:
    """Return the indexes of the `NUM_RANKED` greatest values of each row, in any order."""
    num_values = values.shape[1]
    if num_values <= NUM_RANKED:
        return torch.arange(num_values).expand(len(values), -1)
    # NumPy partitions and sorts with vector instructions: ten times as fast as PyTorch.
    indexes = np.argpartition(values.numpy(), num_values - NUM_RANKED, axis=-1)
    return torch.from_numpy(indexes[:, -NUM_RANKED:])


def _drop_below(least: Tensor, values: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of each row that are not below its `least`, and their tokens.

    Shorter rows are padded with minus infinity to the length of the longest row.
    """
    num_rows, num_columns = values.shape
    indexes = torch.from_numpy(np.flatnonzero(~(values < least[:, None]).numpy()))
    rows = indexes // num_columns
    counts = torch.bincount(rows, minlength=num_rows)
    columns = torch.arange(len(indexes)) - (counts.cumsum(0) - counts)[rows]
    places = rows, columns
    shape = num_rows, int(counts.max())
    kept_values = values.new_full(shape, -torch.inf).index_put_(places, values.view(-1)[indexes])
    kept_ids = token_ids.new_zeros(shape).index_put_(places, token_ids.view(-1)[indexes])
    return kept_values, kept_ids


def _argsort(values: Tensor) -> Tensor:
    return torch.from_numpy(np.argsort(values.numpy(), axis=-1))
