"""Paged attention: one kernel for decodes and for chunks of prefills, by tiles of queries.

A program has the query heads of one KV head for the queries of one tile, so that keys and values
are read once for all of them. The keys of a decode are split among several programs, whose parts a
second kernel puts together: a batch of few sequences would leave most of the chip idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kernels.launch import INTERPRETED, pad
from workers.engine.cuda.kernels.plan import TILE_WIDTH, KernelPlan, count_queries

LOG2_E = tl.constexpr(1.4426950408889634)
TILE = tl.constexpr(TILE_WIDTH)

# The least that the matrix units multiply.
MIN_SIDE = 16
# Keys of one step of a program's loop. Several steps are under way at once; together they and the
# queries stay below the 99 KiB of shared memory that the smaller chips have.
DECODE_BYTES = 8 * 2**10
CHUNK_BYTES = 16 * 2**10


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]; rows may be apart
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    plan: KernelPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """As `workers.engine.model.attention.paged_attention`; rows of no tile are left undefined."""
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(num_tokens, num_heads, head_dim)
    group = num_heads // key_cache.shape[2]
    rest = (query, key_cache, value_cache, plan, scale, window, softcap)
    if len(plan.chunks):
        rows = pad(count_queries(group, head_dim, query.dtype) * group, MIN_SIDE)
        _launch(output, None, plan.chunks, 1, rows, CHUNK_BYTES, *rest)
    if len(plan.decodes):
        rows = pad(group, MIN_SIDE)
        if plan.num_splits == 1:
            _launch(output, None, plan.decodes, 1, rows, DECODE_BYTES, *rest)
        else:
            shape = (len(plan.decodes), num_heads, plan.num_splits)
            parts = (
                torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device),
                torch.empty(shape, dtype=torch.float32, device=query.device),
            )
            _launch(output, parts, plan.decodes, plan.num_splits, rows, DECODE_BYTES, *rest)
            _merge[shape[:2]](
                output,
                *parts,
                plan.decodes,
                NUM_SPLITS=plan.num_splits,
                HEAD_DIM=head_dim,
                DIM_PAD=pad(head_dim),
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
) -> None:
    num_kv_heads, head_dim = key_cache.shape[2:]
    assert query.stride()[1:] == (head_dim, 1)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    dim_pad = pad(head_dim, MIN_SIDE)
    keys = step_bytes // (dim_pad * key_cache.element_size())
    part, part_lse = parts or (output, output)
    is_chunk = step_bytes == CHUNK_BYTES
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
        INTERPRETED=INTERPRETED,
        num_warps=8 if rows > 64 else 4,
        # Of which the block table's loads take half: the keys' wait for them.
        num_stages=2 if is_chunk else 5,
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
    INTERPRETED: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(tiles + tile * TILE)
    num_queries = tl.load(tiles + tile * TILE + 1)
    first_position = tl.load(tiles + tile * TILE + 2)
    table = block_table + tl.load(tiles + tile * TILE + 3) * table_stride

    # Row r is query r // GROUP, by head r % GROUP of those that share the KV head.
    r = tl.arange(0, ROWS)
    row, head = first_row + r // GROUP, kv_head * GROUP + r % GROUP
    position = first_position + r // GROUP
    d = tl.arange(0, DIM_PAD)
    is_dim = d < HEAD_DIM
    is_query = (r // GROUP < num_queries)[:, None] & is_dim[None, :]
    q_at = query + row[:, None] * query_stride + head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_at, mask=is_query, other=0.0)

    # The tile sees keys of [begin, stop); this program has [low, high) of them. Only the last step
    # before `stop` may be cut short.
    stop = first_position + num_queries
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
    steps_each = (stop - begin + KEYS * NUM_SPLITS - 1) // (KEYS * NUM_SPLITS)
    low = begin + split * steps_each * KEYS
    high = tl.minimum(low + steps_each * KEYS, stop)

    acc, maximum, total = _weigh(
        q,
        key_cache,
        value_cache,
        table,
        position,
        low,
        high,
        kv_head,
        scale,
        softcap,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        KEYS,
        WINDOW,
        SOFTCAP,
        INTERPRETED,
    )
    # Without keys all is 0 but the maximum, -inf: such a part will weigh nothing.
    total = tl.where(total == 0, 1.0, total)
    acc = acc / total[:, None]
    if NUM_SPLITS == 1:
        out_at = output + (row[:, None] * (NUM_KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM
        tl.store(out_at + d[None, :], acc.to(output.dtype.element_ty), mask=is_query)
    else:
        at = (tile * (NUM_KV_HEADS * GROUP) + head) * NUM_SPLITS + split
        tl.store(part + at[:, None] * HEAD_DIM + d[None, :], acc, mask=is_query)
        tl.store(part_lse + at, maximum + tl.log2(total), mask=r < GROUP)


@triton.jit
def _weigh(
    q,  # [ROWS, DIM_PAD]
    key_cache,
    value_cache,
    table,  # of the blocks of the sequence
    position,  # [ROWS]
    low,
    high,
    kv_head,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Over the keys [low, high): values by their weights, the largest score, the weights' sum.

    The softmax as it goes along: whenever a larger score comes up, what there is shrinks.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM_PAD: tl.constexpr = q.shape[1]
    d = tl.arange(0, DIM_PAD)
    is_dim = d < HEAD_DIM
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, DIM_PAD], 0.0, tl.float32)
    for start in range(low, high, KEYS):
        n = start + tl.arange(0, KEYS)
        is_kept = (n < high)[:, None] & is_dim[None, :]
        block = tl.load(table + n // BLOCK_SIZE, mask=n < high, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + n % BLOCK_SIZE
        kept_at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(key_cache + kept_at, mask=is_kept, other=0.0)
        v = tl.load(value_cache + kept_at, mask=is_kept, other=0.0)
        if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:  # by tanh
            scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1))
        seen = n[None, :] <= position[:, None]
        if WINDOW:
            seen &= n[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row may have seen nothing yet, and -inf - -inf is no number.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        maximum = new_maximum

    return acc, maximum, total


@triton.jit
def _merge(
    output,
    part,
    part_lse,
    tiles,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """The parts of a decode and head, each weighed by the sum of its weights."""
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
