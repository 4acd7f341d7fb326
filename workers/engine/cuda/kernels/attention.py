"""Paged attention: one Triton kernel for decodes and for chunks of prefills, on tiles of queries.

The softmax is computed online (Milakov and Gimelshein, 2018), as in FlashAttention. A program
processes the query heads of one KV head for one tile, so that keys and values are read once for all
of them. The keys of a decode are split among several programs and a second kernel merges their
results, as in Flash-Decoding: a batch of few sequences would leave most of the chip idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kernels.launch import INTERPRETED, pad_to_power_of_two
from workers.engine.cuda.kernels.plan import TILE_WIDTH, KernelPlan, count_queries

LOG2_E = tl.constexpr(1.4426950408889634)
TILE = tl.constexpr(TILE_WIDTH)

# Smallest side of a product on the matrix units.
MIN_SIDE = 16
# Bytes of keys per step of a program's loop. Several steps are pipelined; with the queries they fit
# into the 99 KiB of shared memory that smaller chips have. For 4-byte types see `count_queries`.
DECODE_BYTES = 8 * 2**10
CHUNK_BYTES = 16 * 2**10
WIDE_CHUNK_BYTES = 8 * 2**10


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
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(num_tokens, num_heads, head_dim)
    group = num_heads // key_cache.shape[2]
    arguments = (query, key_cache, value_cache, plan, scale, window, softcap, sinks)
    if len(plan.chunks):
        rows = pad_to_power_of_two(count_queries(group, head_dim, query.dtype) * group, MIN_SIDE)
        step_bytes = WIDE_CHUNK_BYTES if query.dtype.itemsize > 2 else CHUNK_BYTES
        _launch(output, None, plan.chunks, 1, rows, step_bytes, *arguments)
    if len(plan.decodes):
        rows = pad_to_power_of_two(group, MIN_SIDE)
        if plan.num_splits == 1:
            _launch(output, None, plan.decodes, 1, rows, DECODE_BYTES, *arguments)
        else:
            shape = (len(plan.decodes), num_heads, plan.num_splits)
            parts = (
                torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device),
                torch.empty(shape, dtype=torch.float32, device=query.device),
            )
            _launch(output, parts, plan.decodes, plan.num_splits, rows, DECODE_BYTES, *arguments)
            _merge_splits[shape[:2]](
                output,
                *parts,
                plan.decodes,
                NUM_SPLITS=plan.num_splits,
                HEAD_DIM=head_dim,
                DIM_PAD=pad_to_power_of_two(head_dim),
                num_warps=4,
            )
    return output


def _launch(
    output: Tensor,
    parts: tuple[Tensor, Tensor] | None,
    tiles: Tensor,
    num_splits: int,
    rows: int,
    step_bytes: int,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: KernelPlan,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    num_kv_heads, head_dim = key_cache.shape[2:]
    assert query.stride()[1:] == (head_dim, 1)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    dim_pad = pad_to_power_of_two(head_dim, MIN_SIDE)
    keys = step_bytes // (dim_pad * key_cache.element_size())
    part, part_lse = parts or (output, output)
    _attend[(len(tiles), num_kv_heads, num_splits)](
        output,
        part,
        part_lse,
        query,
        key_cache,
        value_cache,
        tiles,
        plan.block_table,
        query.stride(0),
        plan.block_table.stride(0),
        scale,
        softcap or 1.0,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=query.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=key_cache.shape[1],
        ROWS=rows,
        KEYS=min(max(keys, MIN_SIDE), 128),
        NUM_SPLITS=num_splits,
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        num_warps=8 if rows > 64 else 4,
        # Loads of the block table take half of the stages, because the loads of keys wait for them.
        num_stages=2 if tiles is plan.chunks else 5,
    )


@triton.jit(do_not_specialize=["query_stride", "table_stride"])
def _attend(
    output,  # [num_tokens, num_heads, HEAD_DIM]
    part,  # [num_tiles, num_heads, NUM_SPLITS, HEAD_DIM] float32
    part_lse,  # [num_tiles, num_heads, NUM_SPLITS] float32: log2 of the sum of the weights
    query,
    key_cache,
    value_cache,
    tiles,
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, num_queries, first_position, sequence = _load_tile(tiles, tile)
    # Row r is query r // GROUP of the tile, and head r % GROUP of the group with this KV head.
    r = tl.arange(0, ROWS)
    row, head = first_row + r // GROUP, kv_head * GROUP + r % GROUP
    d = tl.arange(0, DIM_PAD)
    is_query = (r // GROUP < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = query + row[:, None] * query_stride + head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_at, mask=is_query, other=0.0)
    low, high = _key_range(first_position, num_queries, split, KEYS, NUM_SPLITS, WINDOW)
    attended, lse = _attend_keys(
        q,
        key_cache + kv_head * HEAD_DIM,
        value_cache + kv_head * HEAD_DIM,
        block_table + sequence * table_stride,
        first_position + r // GROUP,
        _load_sinks(sinks, head, split),
        low,
        high,
        scale,
        softcap,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        KEYS,
        WINDOW,
        SOFTCAP,
    )
    if NUM_SPLITS == 1:
        out_at = output + (row[:, None] * (NUM_KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM
        tl.store(out_at + d[None, :], attended.to(output.dtype.element_ty), mask=is_query)
    else:
        at = (tile * (NUM_KV_HEADS * GROUP) + head) * NUM_SPLITS + split
        tl.store(part + at[:, None] * HEAD_DIM + d[None, :], attended, mask=is_query)
        tl.store(part_lse + at, lse, mask=r < GROUP)


@triton.jit
def _load_tile(tiles, tile):
    """Return the fields of a tile, as listed at `TILE_WIDTH`."""
    at = tiles + tile * TILE
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _load_sinks(sinks, head, split):
    """Return the sink of each row in the first split, and -inf otherwise, for log2."""
    scores = tl.full(head.shape, float("-inf"), tl.float32)
    if sinks is not None:
        scores = tl.where(split == 0, tl.load(sinks + head).to(tl.float32) * LOG2_E, scores)
    return scores


@triton.jit
def _key_range(
    first_position,
    num_queries,
    split,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the keys [low, high) of one split; the tile sees the keys [begin, stop).

    `low` is a multiple of KEYS, so only the last step before `stop` is shorter than KEYS.
    """
    stop = first_position + num_queries
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
    steps_each = (stop - begin + KEYS * NUM_SPLITS - 1) // (KEYS * NUM_SPLITS)
    low = begin + split * steps_each * KEYS
    return low, tl.minimum(low + steps_each * KEYS, stop)


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
def _merge_splits(
    output,
    part,
    part_lse,
    tiles,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Merge the splits of one decode and head, in proportion to their sums of weights."""
    tile, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    split, d = tl.arange(0, NUM_SPLITS), tl.arange(0, DIM_PAD)
    at = (tile * num_heads + head) * NUM_SPLITS + split
    lse = tl.load(part_lse + at)
    weights = tl.exp2(lse - tl.max(lse, 0))
    part_at = part + at[:, None] * HEAD_DIM + d[None, :]
    parts = tl.load(part_at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    out_at = output + (tl.load(tiles + tile * TILE) * num_heads + head) * HEAD_DIM + d
    tl.store(out_at, merged.to(output.dtype.element_ty), mask=d < HEAD_DIM)
