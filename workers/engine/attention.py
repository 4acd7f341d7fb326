"""Attention over a paged KV cache, for a flat batch of prefill chunks and decodes together.

It owns the layout of the cache and the index arithmetic of a step; it knows neither requests nor
models. Every tensor that depends on the step alone is made once, by `plan_step`; the layers share
it. transformers calls `paged_attention` for every layer through its attention interface; the plan
and the cache travel down to it as keyword arguments of the model's forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "pagemill_paged"

# Below this padding costs less than a call of its own.
SHORT_LEN = 256

KVCache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer: [num_blocks, block_size, num_kv_heads, head_dim]."""

# What a model may ask of its attention that this one does not do.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences of like length that bring one token, padded to the longest: one call for all."""

    rows: Tensor | None  # [num_decodes], in the flat batch; None when they are the whole batch
    blocks: Tensor  # [num_decodes * max_num_blocks]
    num_decodes: int
    max_seq_len: int
    mask: Tensor | None  # [num_decodes, 1, 1, max_seq_len], 0 or -inf; None when none is shorter


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one sequence; they see its cached past, themselves and what is between."""

    start: int
    stop: int
    blocks: Tensor  # [num_blocks of the sequence]
    seq_len: int
    mask: Tensor | None  # [stop - start, seq_len], 0 or -inf; None when there is no past


@dataclass(frozen=True, slots=True)
class StepPlan:
    slots: Tensor  # [num_tokens]: block_id * block_size + offset, where each token's K and V go
    decodes: list[Decodes]
    chunks: list[Chunk]


def plan_step(
    block_tables: Sequence[Sequence[int]],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> StepPlan:
    """Sequence i brings the batch's tokens [query_start_loc[i], query_start_loc[i + 1]).

    They are the last ones of its `seq_lens[i]` tokens; token t of a sequence is kept in block
    `block_table[t // block_size]`.
    """
    slots: list[int] = []
    decodes: dict[int, list[int]] = {}
    chunks = []
    for i, (table, seq_len) in enumerate(zip(block_tables, seq_lens, strict=True)):
        start, stop = query_start_loc[i], query_start_loc[i + 1]
        past = seq_len - (stop - start)
        slots += [
            table[t // block_size] * block_size + t % block_size for t in range(past, seq_len)
        ]
        if stop - start == 1:
            decodes.setdefault(_length_class(seq_len), []).append(i)
        else:
            blocks = torch.tensor(table[: -(-seq_len // block_size)], device=device)
            mask = _causal_mask(stop - start, seq_len, dtype, device) if past else None
            chunks.append(Chunk(start, stop, blocks, seq_len, mask))
    whole = not chunks and len(decodes) == 1
    return StepPlan(
        torch.tensor(slots, device=device),
        [
            _plan_decodes(
                [block_tables[i] for i in group],
                None if whole else [query_start_loc[i] for i in group],
                [seq_lens[i] for i in group],
                block_size=block_size,
                dtype=dtype,
                device=device,
            )
            for group in decodes.values()
        ],
        chunks,
    )


def _length_class(seq_len: int) -> int:
    """Lengths of one class differ by less than a factor of two, or are all short.

    A group is padded to its longest, so that without classes one long context would have the cache
    of every other decode gathered at its length.
    """
    return max(seq_len - 1, SHORT_LEN - 1).bit_length()


def _plan_decodes(
    block_tables: list[Sequence[int]],
    rows: list[int] | None,
    seq_lens: list[int],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decodes:
    longest = max(seq_lens)
    num_blocks = -(-longest // block_size)
    # Short tables are padded with block 0: what is read there is finite, and masked.
    padded = [[*table[:num_blocks], *[0] * (num_blocks - len(table))] for table in block_tables]
    mask = None
    if min(seq_lens) < longest:
        hidden = torch.arange(longest) >= torch.tensor(seq_lens)[:, None]
        mask = _additive(hidden, dtype, device)[:, None, None, :]
    return Decodes(
        rows=None if rows is None else torch.tensor(rows, device=device),
        blocks=torch.tensor(padded, device=device).flatten(),
        num_decodes=len(seq_lens),
        max_seq_len=longest,
        mask=mask,
    )


def _causal_mask(
    num_queries: int, seq_len: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Query j stands at token seq_len - num_queries + j and sees the tokens [0, that]."""
    hidden = torch.ones(num_queries, seq_len, dtype=torch.bool).triu(seq_len - num_queries + 1)
    return _additive(hidden, dtype, device)


def _additive(hidden: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As numbers and not as bools, which SDPA would turn into numbers again in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)


def new_cache(
    num_layers: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    # Zeros and not empty memory: a masked NaN would still spoil the sum over the values.
    return [
        (
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        for _ in range(num_layers)
    ]


def write_cache(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """`rows` [num_tokens, num_kv_heads, head_dim] go to their slots of one layer's cache."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    plan: StepPlan,
    scale: float,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    if len(plan.decodes) == 1 and plan.decodes[0].rows is None:
        return _attend_decodes(query, key_cache, value_cache, plan.decodes[0], scale)
    output = torch.empty_like(query)
    for chunk in plan.chunks:
        rows = query[chunk.start : chunk.stop]
        output[chunk.start : chunk.stop] = _attend_chunk(rows, key_cache, value_cache, chunk, scale)
    for decodes in plan.decodes:
        assert decodes.rows is not None
        rows = query.index_select(0, decodes.rows)
        attended = _attend_decodes(rows, key_cache, value_cache, decodes, scale)
        output.index_copy_(0, decodes.rows, attended)
    return output


def _attend_decodes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, decodes: Decodes, scale: float
) -> Tensor:
    """The query heads of one KV head stand where SDPA expects a sequence: they share the keys."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    shape = (decodes.num_decodes, -1, num_kv_heads, head_dim)
    # index_select: advanced indexing of the cache took five times as long.
    key = key_cache.index_select(0, decodes.blocks).view(shape)[:, : decodes.max_seq_len]
    value = value_cache.index_select(0, decodes.blocks).view(shape)[:, : decodes.max_seq_len]
    output = F.scaled_dot_product_attention(
        query.reshape(decodes.num_decodes, num_kv_heads, -1, head_dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=decodes.mask,
        scale=scale,
    )
    return output.reshape(query.shape)


def _attend_chunk(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, chunk: Chunk, scale: float
) -> Tensor:
    """KV heads stand where SDPA expects a batch, so that their query heads share them uncopied."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_queries, num_heads = query.shape[:2]
    group = num_heads // num_kv_heads

    def gather(cache: Tensor) -> Tensor:  # [num_kv_heads, group, seq_len, head_dim]
        rows = cache.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.seq_len]
        return rows.transpose(0, 1)[:, None].expand(-1, group, -1, -1)

    output = F.scaled_dot_product_attention(
        query.transpose(0, 1).reshape(num_kv_heads, group, num_queries, head_dim),
        gather(key_cache),
        gather(value_cache),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
    )
    return output.flatten(0, 1).transpose(0, 1)


def attention_of_layer(
    module: torch.nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    plan: StepPlan,
    kv_cache: KVCache,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, num_tokens, num_heads, head_dim]
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name} of {type(module).__name__} is not supported")
    key_cache, value_cache = kv_cache[int(module.layer_idx)]  # type: ignore[arg-type]
    write_cache(key_cache, plan.slots, key[0].transpose(0, 1))
    write_cache(value_cache, plan.slots, value[0].transpose(0, 1))
    output = paged_attention(query[0].transpose(0, 1), key_cache, value_cache, plan, scaling)
    return output[None], None


# No mask function goes with it: transformers makes no mask for a name it has none for, and so
# does not look for packed sequences in the positions either.
AttentionInterface.register(ATTENTION, attention_of_layer)
