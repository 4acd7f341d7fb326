"""Step plan: the slots of a paged KV cache that a step writes, and the blocks that it reads.

The module is independent of requests and models. `plan_step` computes every tensor that depends on
the step alone, once for all layers with the same window.

With a sliding window of w tokens, the token at t sees the tokens (t - w, t]. A sequence that brings
the tokens [past, seq_len) needs nothing before past + 1 - w, so blocks that lie wholly before it
are not read; `first` is the first token of the first block that is read.

A span is a run of tokens that attend to each other in both directions, such as an image's tokens.
All its tokens are cached or in the chunk, so only the mask of the chunk differs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Up to this length, padding costs less than a separate attention call.
SHORT_LEN = 256

Window = int | None
"""Number of tokens that a layer sees, the current one included; None for all."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar length, padded to the longest: attention takes one call for all."""

    rows: Tensor | None  # [num_decodes] int64, in the flat batch; None if they are the whole batch
    blocks: Tensor | slice  # [num_decodes * max_num_blocks] int64; a slice is not copied
    num_decodes: int
    max_len: int  # keys read per sequence
    mask: Tensor | None  # [num_decodes, 1, 1, max_len], 0 or -inf; None if all keys are seen


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows [start, stop) of the batch: several tokens of one sequence."""

    start: int
    stop: int
    blocks: Tensor | slice  # [num_blocks] int64, the blocks that are read; a slice is not copied
    num_keys: int  # tokens [first, seq_len)
    mask: Tensor | None  # [stop - start, num_keys], 0 or -inf; None for causal without a past


@dataclass(frozen=True, slots=True)
class CacheReads:
    """KV cache reads of all layers with the same window."""

    decodes: list[DecodeGroup]
    chunks: list[PrefillChunk]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """KV cache writes and reads of one step."""

    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset of each token
    reads: dict[Window, CacheReads]


def plan_step(
    block_tables: Sequence[Sequence[int]],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]] = (),
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[Window] = (None,),
    opens_full_layers: bool = True,
    exceeds_windows: bool = False,
) -> StepPlan:
    """Return the plan of a batch with one block table per sequence.

    Sequence i has the batch's tokens [query_start_loc[i], query_start_loc[i + 1]), which are the
    last of its `seq_lens[i]` tokens. Token t of a sequence is stored in block
    `block_table[t // block_size]`. `spans` are the spans of each sequence, none by default.
    `windows` are the windows of the model's layers. Unless it `opens_full_layers`, layers without a
    window are causal in spans, too. If it `exceeds_windows`, a span is visible as a whole in layers
    with a window.
    """
    slots: list[int] = []
    for i, (table, seq_len) in enumerate(zip(block_tables, seq_lens, strict=True)):
        past = seq_len - (query_start_loc[i + 1] - query_start_loc[i])
        slots += [
            table[t // block_size] * block_size + t % block_size for t in range(past, seq_len)
        ]
    batch = _Batch(
        block_tables, query_start_loc, seq_lens, block_size, dtype, device, exceeds_windows
    )
    open_spans = {window: spans for window in windows if window or opens_full_layers}
    return StepPlan(
        torch.tensor(slots, device=device),
        {window: _plan_reads(batch, window, open_spans.get(window, ())) for window in windows},
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Arguments of `plan_step`."""

    block_tables: Sequence[Sequence[int]]
    query_start_loc: Sequence[int]
    seq_lens: Sequence[int]
    block_size: int
    dtype: torch.dtype
    device: torch.device
    exceeds_windows: bool

    def first(self, i: int, window: Window) -> int:
        """Return the first token of the first block that is read of sequence i."""
        if window is None:
            return 0
        past = self.seq_lens[i] - (self.query_start_loc[i + 1] - self.query_start_loc[i])
        return max(0, past + 1 - window) // self.block_size * self.block_size

    def blocks(self, i: int, first: int) -> Sequence[int]:
        """Return the blocks of sequence i from token `first` on."""
        stop = -(-self.seq_lens[i] // self.block_size)
        return self.block_tables[i][first // self.block_size : stop]


def _plan_reads(
    batch: _Batch, window: Window, spans: Sequence[Sequence[tuple[int, int]]]
) -> CacheReads:
    decodes: dict[int, list[int]] = {}
    chunks = []
    for i, seq_len in enumerate(batch.seq_lens):
        start, stop = batch.query_start_loc[i], batch.query_start_loc[i + 1]
        first = batch.first(i, window)
        if stop - start == 1:
            decodes.setdefault(_length_class(seq_len - first), []).append(i)
        else:
            blocks = _index(batch.blocks(i, first), batch.device)
            open_spans = spans[i] if spans else ()
            mask = _chunk_mask(stop - start, first, seq_len, window, open_spans, batch)
            chunks.append(PrefillChunk(start, stop, blocks, seq_len - first, mask))
    is_whole_batch = not chunks and len(decodes) == 1
    return CacheReads(
        [_plan_decodes(batch, members, is_whole_batch, window) for members in decodes.values()],
        chunks,
    )


def _length_class(num_keys: int) -> int:
    """Return the class of a length; lengths of a class differ by less than a factor of two.

    All short lengths are one class. A group is padded to its longest member: without classes, one
    long context would make the cache of all other decodes be gathered at its length.
    """
    return max(num_keys - 1, SHORT_LEN - 1).bit_length()


def _plan_decodes(
    batch: _Batch, members: list[int], is_whole_batch: bool, window: Window
) -> DecodeGroup:
    firsts = [batch.first(i, window) for i in members]
    lens = [batch.seq_lens[i] - first for i, first in zip(members, firsts, strict=True)]
    # Some tokens of the first block may lie before the window.
    starts = [0 if window is None else max(0, length - window) for length in lens]
    longest = max(lens)
    num_blocks = -(-longest // batch.block_size)
    tables = [batch.blocks(i, first) for i, first in zip(members, firsts, strict=True)]
    # Short tables are padded with their own last block. It is masked, but a NaN would pass the
    # mask, and this way a NaN can only come from the request itself.
    padded = [[*table, *[table[-1]] * (num_blocks - len(table))] for table in tables]
    mask = None
    if min(lens) < longest or any(starts):
        key = torch.arange(longest)
        hidden = (key >= torch.tensor(lens)[:, None]) | (key < torch.tensor(starts)[:, None])
        mask = _additive_mask(hidden, batch.dtype, batch.device)[:, None, None, :]
    rows = [batch.query_start_loc[i] for i in members]
    return DecodeGroup(
        rows=None if is_whole_batch else torch.tensor(rows, device=batch.device),
        blocks=_index([block for table in padded for block in table], batch.device),
        num_decodes=len(members),
        max_len=longest,
        mask=mask,
    )


def _index(blocks: Sequence[int], device: torch.device) -> Tensor | slice:
    """Return the index of blocks; consecutive blocks, which are often a prompt's, are a slice."""
    start, stop = blocks[0], blocks[0] + len(blocks)
    if blocks[-1] == stop - 1 and list(blocks) == [*range(start, stop)]:
        return slice(start, stop)
    return torch.tensor(blocks, device=device)


def _chunk_mask(
    num_queries: int,
    first: int,
    seq_len: int,
    window: Window,
    spans: Sequence[tuple[int, int]],
    batch: _Batch,
) -> Tensor | None:
    """Return the mask [num_queries, seq_len - first] of a chunk; None if it is plainly causal.

    Query j is token seq_len - num_queries + j. Columns are the tokens [first, seq_len).
    """
    if num_queries == seq_len and (window is None or seq_len <= window) and not spans:
        return None
    every = torch.ones(num_queries, seq_len - first, dtype=torch.bool)
    past = seq_len - num_queries
    last = past - first  # the column of query 0
    outside = every.tril(last - window) if window is not None else ~every
    hidden = every.triu(last + 1) | outside
    for start, stop in spans:
        hidden[max(start - past, 0) : stop - past, max(start - first, 0) : stop - first] = False
    if not batch.exceeds_windows:
        hidden |= outside
    return _additive_mask(hidden, batch.dtype, batch.device)


def _additive_mask(hidden: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask as 0 and -inf: SDPA would convert a bool mask again in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)
