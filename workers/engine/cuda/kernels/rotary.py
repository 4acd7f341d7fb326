"""Rotary embedding (Su et al., 2021) fused with the write into the KV cache.

The angles come from a table computed by the model's own module, so they are identical to the bit.
A position may have several axes (M-RoPE of Qwen2-VL): each pair of a head's dimensions is rotated
by one of them, in sections or interleaved, according to `Rotary.axes`.

Positions are checked when a request is added. The kernel clamps them to the table all the same: a
read outside of it may end the CUDA context, and with it every request of the engine.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kernels.tiling import pad_to_power_of_two
from workers.engine.model.rotary_table import find_axes


@dataclass(frozen=True, slots=True)
class Rotary:
    """Table of rotary angles."""

    cos: Tensor  # [max_positions, head_dim // 2], in the model's dtype
    sin: Tensor
    axes: Tensor  # [head_dim // 2] int32: row of the positions that rotates the pair


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before the rotation, as in Qwen3."""

    weight: Tensor  # [2, head_dim]: of queries, of keys
    eps: float


def tabulate_rotary(module: Any, max_positions: int, num_axes: int, like: Tensor) -> Rotary:
    """Tabulate a rotary embedding of transformers, in the dtype and on the device of `like`."""
    positions = torch.arange(max_positions, device=like.device)[None]
    if num_axes > 1:
        positions = positions.expand(num_axes, 1, -1)
    cos, sin = module(like, positions)
    half = cos.shape[-1] // 2
    axes = find_axes(module, num_axes, like)[:half].int()
    return Rotary(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous(), axes)


def rotate_and_write(
    qkv: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    positions: Tensor,  # [num_axes, num_tokens] int64
    rotary: Rotary,
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    slot_mapping: Tensor,  # [num_tokens] int32; a token of slot -1 is not written
    norm: HeadNorm | None = None,
) -> Tensor:  # the queries: [num_tokens, num_heads, head_dim], in `qkv`'s memory
    """Rotate queries in place, and write rotated keys and values to the cache."""
    num_tokens, num_rows, head_dim = qkv.shape
    num_kv_heads = key_cache.shape[2]
    num_heads = num_rows - 2 * num_kv_heads
    assert qkv.is_contiguous()
    half = head_dim // 2
    _rotate_and_write[(num_tokens, num_heads + num_kv_heads)](
        qkv,
        positions,
        rotary.cos,
        rotary.sin,
        rotary.axes,
        key_cache,
        value_cache,
        slot_mapping,
        norm.weight if norm else rotary.cos,
        norm.eps if norm else 0.0,
        positions.stride(0),
        len(rotary.cos),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        HALF_PAD=pad_to_power_of_two(half),
        NORM=norm is not None,
        num_warps=1,
    )
    return qkv[:, :num_heads]


@triton.jit(do_not_specialize=["axis_stride", "num_positions"])
def _rotate_and_write(
    qkv,
    positions,
    cos_table,
    sin_table,
    axes,
    key_cache,
    value_cache,
    slot_mapping,
    norm_weight,
    eps,
    axis_stride,
    num_positions,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Each program handles one query head of a token, or one KV head: its key and value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF_PAD)
    within = i < HALF
    at = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + i
    first = tl.load(qkv + at, mask=within, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + HALF, mask=within, other=0.0).to(tl.float32)
    dtype = qkv.dtype.element_ty
    if NORM:
        mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF)
        scale = 1 / tl.sqrt(mean + eps)
        weight = norm_weight + tl.where(head < NUM_HEADS, 0, 2 * HALF) + i
        first_weight = tl.load(weight, mask=within, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF, mask=within, other=0.0).to(tl.float32)
        # Rounded to the model's dtype as often as in transformers.
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = (
            ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
        )

    axis = tl.load(axes + i, mask=within, other=0)
    position = tl.load(positions + axis * axis_stride + token)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    cos = tl.load(cos_table + position * HALF + i, mask=within, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + position * HALF + i, mask=within, other=0.0).to(tl.float32)
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)

    if head < NUM_HEADS:
        tl.store(qkv + at, rotated_first, mask=within)
        tl.store(qkv + at + HALF, rotated_second, mask=within)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        is_written = within & (slot >= 0)
        to = (slot * NUM_KV_HEADS + head - NUM_HEADS) * (2 * HALF) + i
        tl.store(key_cache + to, rotated_first, mask=is_written)
        tl.store(key_cache + to + HALF, rotated_second, mask=is_written)
        value = qkv + at + NUM_KV_HEADS * (2 * HALF)
        tl.store(value_cache + to, tl.load(value, mask=is_written), mask=is_written)
        tl.store(value_cache + to + HALF, tl.load(value + HALF, mask=is_written), mask=is_written)


def write_cache(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    slot_mapping: Tensor,  # [num_tokens] int32; a token of slot -1 is not written
) -> None:
    """Write keys and values to the cache unchanged, for models that rotate keys themselves."""
    size = key[0].numel()
    _write_cache[(len(key),)](
        key.reshape(-1, size),
        value.reshape(-1, size),
        key_cache,
        value_cache,
        slot_mapping,
        SIZE=size,
        SIZE_PAD=pad_to_power_of_two(size),
    )


@triton.jit
def _write_cache(
    key, value, key_cache, value_cache, slot_mapping, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    i = tl.arange(0, SIZE_PAD)
    is_written = (i < SIZE) & (slot >= 0)
    tl.store(
        key_cache + slot * SIZE + i, tl.load(key + token * SIZE + i, mask=is_written), is_written
    )
    tl.store(
        value_cache + slot * SIZE + i,
        tl.load(value + token * SIZE + i, mask=is_written),
        is_written,
    )
