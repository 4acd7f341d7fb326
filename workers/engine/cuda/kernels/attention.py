"""Paged attention: one Triton kernel for decodes and for chunks of prefills, on tiles of queries.

The softmax is computed online (Milakov and Gimelshein, 2018), as in FlashAttention. A program
processes the query heads of one KV head for one part of a tile, so that keys and values are read
once for all of them. A second kernel merges the results of tiles that have several parts, as in
Flash-Decoding: a batch of few or unequal sequences would leave most of the chip idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kernels.plan import MERGE_WIDTH, PART_WIDTH, KernelPlan, TileParts
from workers.engine.cuda.kernels.tiling import (
    MIN_SIDE,
    count_keys,
    count_queries,
    pad_to_power_of_two,
)

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True if kernels run in Triton's interpreter on a CPU: TRITON_INTERPRET=1 before the import."""

LOG2_E = tl.constexpr(1.4426950408889634)
PART = tl.constexpr(PART_WIDTH)
MERGE = tl.constexpr(MERGE_WIDTH)

# Values of partial results that a program of the merge reads at once: 32 for each of its threads.
MERGED_VALUES = 4096


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]; rows may be strided
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    plan: KernelPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """See `workers.engine.model.attention.paged_attention`; rows without a tile are undefined."""
    output = query.new_empty(query.shape)
    arguments = (query, key_cache, value_cache, plan.block_table, scale, window, softcap, sinks)
    if plan.chunks:
        _run(output, plan.chunks[window], True, *arguments)
    if plan.decodes:
        _run(output, plan.decodes[window], False, *arguments)
    return output


def _run(
    output: Tensor,
    tiles: TileParts,
    is_chunk: bool,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    num_heads = query.shape[1]
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    assert query.stride()[1:] == (head_dim, 1)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    group = num_heads // num_kv_heads
    num_queries = count_queries(group, head_dim, query.dtype) if is_chunk else 1
    rows = pad_to_power_of_two(num_queries * group, MIN_SIDE)
    dim_pad = pad_to_power_of_two(head_dim, MIN_SIDE)
    # Without partial results, they are only of the right type for the kernel.
    shape = (max(1, tiles.num_partials), num_queries, num_heads)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    _attend[(len(tiles.parts) * num_kv_heads,)](
        output,
        partial,
        partial_lse,
        query,
        key_cache,
        value_cache,
        tiles.parts,
        block_table,
        query.stride(0),
        block_table.stride(0),
        scale,
        softcap or 1.0,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        QUERIES=num_queries,
        ROWS=rows,
        KEYS=count_keys(head_dim, query.dtype, is_chunk=is_chunk),
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        num_warps=8 if is_chunk or rows > 64 else 4,
        # Loads of the block table take half of the stages, because the loads of keys wait for them.
        num_stages=2 if is_chunk else 5,
    )
    if tiles.num_partials:
        _merge_parts[(len(tiles.merges), num_queries, num_heads)](
            output,
            partial,
            partial_lse,
            tiles.merges,
            QUERIES=num_queries,
            HEAD_DIM=head_dim,
            DIM_PAD=dim_pad,
            RESULTS=MERGED_VALUES // dim_pad,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["query_stride", "table_stride"])
def _attend(
    output,  # [num_tokens, num_heads, HEAD_DIM]
    partial,  # [num_partials, QUERIES, num_heads, HEAD_DIM] float32
    partial_lse,  # [num_partials, QUERIES, num_heads] float32: log2 of the sum of the weights
    query,
    key_cache,
    value_cache,
    parts,
    block_table,
    query_stride,
    table_stride,
    scale,
    softcap,
    sinks,  # [num_heads] or None
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    # The heads of a part are adjacent, so all programs of the longest part begin first.
    kv_head, at = tl.program_id(0) % NUM_KV_HEADS, parts + tl.program_id(0) // NUM_KV_HEADS * PART
    first_row, num_queries, first_position = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    result = tl.load(at + 6)
    # Row r is query r // GROUP of the tile, and head r % GROUP of the group with this KV head.
    r = tl.arange(0, ROWS)
    row, head = first_row + r // GROUP, kv_head * GROUP + r % GROUP
    d = tl.arange(0, DIM_PAD)
    is_row = r // GROUP < num_queries
    is_query = is_row[:, None] & (d < HEAD_DIM)[None, :]
    q_at = query + row[:, None] * query_stride + head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_at, mask=is_query, other=0.0)
    attended, lse = _attend_keys(
        q,
        key_cache + kv_head * HEAD_DIM,
        value_cache + kv_head * HEAD_DIM,
        block_table + tl.load(at + 3) * table_stride,
        first_position + r // GROUP,
        _load_sinks(sinks, head, tl.load(at + 7)),
        tl.load(at + 4),
        tl.load(at + 5),
        scale,
        softcap,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        KEYS,
        WINDOW,
        SOFTCAP,
    )
    if result < 0:
        out_at = output + (row[:, None] * (NUM_KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM
        tl.store(out_at + d[None, :], attended.to(output.dtype.element_ty), mask=is_query)
    else:
        result_at = (result * QUERIES + r // GROUP) * (NUM_KV_HEADS * GROUP) + head
        tl.store(partial + result_at[:, None] * HEAD_DIM + d[None, :], attended, mask=is_query)
        tl.store(partial_lse + result_at, lse, mask=is_row)


@triton.jit
def _load_sinks(sinks, head, is_first):
    """Return the sink of each row in the first part of a tile, and -inf otherwise, for log2."""
    scores = tl.full(head.shape, float("-inf"), tl.float32)
    if sinks is not None:
        scores = tl.where(is_first != 0, tl.load(sinks + head).to(tl.float32) * LOG2_E, scores)
    return scores


@triton.jit
def _attend_keys(
    q,  # [ROWS, DIM_PAD]
    key_cache,  # from the first slot of the KV head on
    value_cache,
    table,  # block table of the sequence
    position,  # [ROWS]
    maximum,  # [ROWS], score of the sink or -inf
    low,
    high,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Return the attention over the keys [low, high), and log2 of the sum of the weights.

    The softmax is online: whenever a greater score appears, the sums so far are scaled down.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM_PAD: tl.constexpr = q.shape[1]
    d = tl.arange(0, DIM_PAD)
    is_dim = d < HEAD_DIM
    total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    acc = tl.full([ROWS, DIM_PAD], 0.0, tl.float32)
    for start in range(low, high, KEYS):
        n = start + tl.arange(0, KEYS)
        is_key = (n < high)[:, None] & is_dim[None, :]
        block = tl.load(table + n // BLOCK_SIZE, mask=n < high, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + n % BLOCK_SIZE
        key_at = (slot * NUM_KV_HEADS)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(key_cache + key_at, mask=is_key, other=0.0)
        v = tl.load(value_cache + key_at, mask=is_key, other=0.0)
        if INTERPRETED:  # The interpreter would multiply the bits of bfloat16 as integers.
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:  # tanh, written with exp2
            scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1))
        is_visible = n[None, :] <= position[:, None]
        if WINDOW:
            is_visible &= n[None, :] > position[:, None] - WINDOW
        scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row may have seen no key yet, and -inf - -inf is NaN.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        maximum = new_maximum

    # A row without keys has zero sums and an lse of -inf, which gives it no weight in the merge.
    total = tl.where(total == 0, 1.0, total)
    return acc / total[:, None], maximum + tl.log2(total)


@triton.jit
def _merge_parts(
    output,
    partial,
    partial_lse,
    merges,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    RESULTS: tl.constexpr,
):
    """Merge the results of one query and head, in proportion to their sums of weights."""
    at, query, head = merges + tl.program_id(0) * MERGE, tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(2)
    first, first_row = tl.load(at), tl.load(at + 2)
    # A query that the tile does not have has no results.
    number = tl.where(query < tl.load(at + 3), tl.load(at + 1), 0)
    i, d = tl.arange(0, RESULTS), tl.arange(0, DIM_PAD)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    acc = tl.full([DIM_PAD], 0.0, tl.float32)
    for start in range(0, number, RESULTS):
        is_result = start + i < number
        result_at = ((first + start + i) * QUERIES + query) * num_heads + head
        lse = tl.load(partial_lse + result_at, mask=is_result, other=float("-inf"))
        # Each row sees a key of the first part, so the first maximum is finite.
        new_maximum = tl.maximum(maximum, tl.max(lse, 0))
        weights = tl.exp2(lse - new_maximum)
        shrink = tl.exp2(maximum - new_maximum)
        row_at = partial + result_at[:, None] * HEAD_DIM + d[None, :]
        rows = tl.load(row_at, mask=is_result[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(rows * weights[:, None], 0)
        maximum = new_maximum
    out_at = output + ((first_row + query) * num_heads + head) * HEAD_DIM + d
    is_written = (d < HEAD_DIM) & (number > 0)
    tl.store(out_at, (acc / total).to(output.dtype.element_ty), mask=is_written)
