"""What a step reads and writes of a paged KV cache: index arithmetic, apart from the reading.

It knows neither requests nor models. Every tensor that depends on the step alone is made once, by
`plan_step`; the layers of one window share it.

A window of w tokens: the token at t sees the tokens (t - w, t], itself among them. Of a sequence
that brings the tokens [past, seq_len) nothing before past + 1 - w is needed, so the blocks that lie
wholly before it are not read; `first` is the token at which the read ones begin.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this padding costs less than a call of its own.
SHORT_LEN = 256

Window = int | None
"""How many tokens back a layer sees, itself included; None for all of them."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences of like length that bring one token, padded to the longest: one call for all."""

    rows: Tensor | None  # [num_decodes], in the flat batch; None when they are the whole batch
    blocks: Tensor  # [num_decodes * max_num_blocks]
    num_decodes: int
    max_len: int  # of what is read of a sequence
    mask: Tensor | None  # [num_decodes, 1, 1, max_len], 0 or -inf; None when all see all of it


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one sequence; they see its cached past, themselves and what is between."""

    start: int
    stop: int
    blocks: Tensor  # [num_blocks that are read]
    num_keys: int  # tokens [first, seq_len)
    mask: Tensor | None  # [stop - start, num_keys], 0 or -inf; None for causal, with no past


@dataclass(frozen=True, slots=True)
class Reads:
    """What the layers of one window read."""

    decodes: list[Decodes]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class StepPlan:
    slots: Tensor  # [num_tokens]: block_id * block_size + offset, where each token's K and V go
    reads: dict[Window, Reads]


def plan_step(
    block_tables: Sequence[Sequence[int]],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[Window] = (None,),
) -> StepPlan:
    """Sequence i brings the batch's tokens [query_start_loc[i], query_start_loc[i + 1]).

    They are the last ones of its `seq_lens[i]` tokens; token t of a sequence is kept in block
    `block_table[t // block_size]`. `windows` are those of the model's layers.
    """
    slots: list[int] = []
    for i, (table, seq_len) in enumerate(zip(block_tables, seq_lens, strict=True)):
        past = seq_len - (query_start_loc[i + 1] - query_start_loc[i])
        slots += [
            table[t // block_size] * block_size + t % block_size for t in range(past, seq_len)
        ]
    batch = _Batch(block_tables, query_start_loc, seq_lens, block_size, dtype, device)
    return StepPlan(
        torch.tensor(slots, device=device),
        {window: _plan_reads(batch, window) for window in windows},
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    block_tables: Sequence[Sequence[int]]
    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    block_size: int
    dtype: torch.dtype
    device: torch.device

    def first(self, i: int, window: Window) -> int:
        """The token of sequence i at which the blocks that are read begin."""
        if window is None:
            return 0
        past = self.seq_lens[i] - (self.query_start_loc[i + 1] - self.query_start_loc[i])
        return max(0, past + 1 - window) // self.block_size * self.block_size

    def blocks(self, i: int, first: int) -> Sequence[int]:
        stop = -(-self.seq_lens[i] // self.block_size)
        return self.block_tables[i][first // self.block_size : stop]


def _plan_reads(batch: _Batch, window: Window) -> Reads:
    decodes: dict[int, list[int]] = {}
    chunks = []
    for i, seq_len in enumerate(batch.seq_lens):
        start, stop = batch.query_start_loc[i], batch.query_start_loc[i + 1]
        first = batch.first(i, window)
        if stop - start == 1:
            decodes.setdefault(_length_class(seq_len - first), []).append(i)
        else:
            blocks = torch.tensor(batch.blocks(i, first), device=batch.device)
            mask = _chunk_mask(stop - start, first, seq_len, window, batch)
            chunks.append(Chunk(start, stop, blocks, seq_len - first, mask))
    whole = not chunks and len(decodes) == 1
    return Reads(
        [_plan_decodes(batch, group, whole, window) for group in decodes.values()],
        chunks,
    )


def _length_class(num_keys: int) -> int:
    """Lengths of one class differ by less than a factor of two, or are all short.

    A group is padded to its longest, so that without classes one long context would have the cache
    of every other decode gathered at its length.
    """
    return max(num_keys - 1, SHORT_LEN - 1).bit_length()


def _plan_decodes(batch: _Batch, group: list[int], whole: bool, window: Window) -> Decodes:
    firsts = [batch.first(i, window) for i in group]
    lens = [batch.seq_lens[i] - first for i, first in zip(group, firsts, strict=True)]
    # Of the first block some tokens may lie before the window.
    starts = [0 if window is None else max(0, length - window) for length in lens]
    longest = max(lens)
    num_blocks = -(-longest // batch.block_size)
    tables = [batch.blocks(i, first) for i, first in zip(group, firsts, strict=True)]
    # Short tables are padded with a block of their own: it is masked, and what spoils a request by
    # not being a number even so is its own.
    padded = [[*table, *[table[-1]] * (num_blocks - len(table))] for table in tables]
    mask = None
    if min(lens) < longest or any(starts):
        key = torch.arange(longest)
        hidden = (key >= torch.tensor(lens)[:, None]) | (key < torch.tensor(starts)[:, None])
        mask = _additive(hidden, batch.dtype, batch.device)[:, None, None, :]
    rows = [batch.query_start_loc[i] for i in group]
    return Decodes(
        rows=None if whole else torch.tensor(rows, device=batch.device),
        blocks=torch.tensor(padded, device=batch.device).flatten(),
        num_decodes=len(group),
        max_len=longest,
        mask=mask,
    )


def _chunk_mask(
    num_queries: int, first: int, seq_len: int, window: Window, batch: _Batch
) -> Tensor | None:
    """Query j stands at token seq_len - num_queries + j and sees none behind it.

    Columns are the tokens [first, seq_len).
    """
    if num_queries == seq_len and (window is None or seq_len <= window):
        return None
    hidden = torch.ones(num_queries, seq_len - first, dtype=torch.bool)
    last = seq_len - num_queries - first  # the column of query 0
    if window is None:
        hidden.triu_(last + 1)
    else:
        hidden = hidden.triu(last + 1) | hidden.tril(last - window)
    return _additive(hidden, batch.dtype, batch.device)


def _additive(hidden: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As numbers and not as bools, which SDPA would turn into numbers again in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)
