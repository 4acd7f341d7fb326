"""Sizes by which the kernels cut the steps of a decoder."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from workers.engine.model.step_plan import Window

# Rows of a tile in a prefill, one per query and query head: enough to fill the matrix units, and
# limited in bytes so that the rows fit into registers. Products of 4-byte types do not use the
# matrix units and need several times as many registers.
CHUNK_ROWS, CHUNK_BYTES = 128, 32 * 2**10
WIDE_CHUNK_ROWS, WIDE_CHUNK_BYTES = 32, 16 * 2**10

# Smallest side of a product on the matrix units.
MIN_SIDE = 16
# Bytes of keys per step of a program's loop. Several steps are pipelined; with the queries they fit
# into the 99 KiB of shared memory that smaller chips have.
DECODE_KEY_BYTES, CHUNK_KEY_BYTES, WIDE_CHUNK_KEY_BYTES = 8 * 2**10, 16 * 2**10, 8 * 2**10
MAX_KEYS = 128

# An H100 or H200 has 132 multiprocessors; smaller chips have fewer. Each has room for four programs
# of decodes, or for one of a chunk.
NUM_MULTIPROCESSORS = 132
PROGRAMS_OF_DECODES, PROGRAMS_OF_CHUNKS = 4, 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes by which the steps of a decoder are cut. Tiles fit into the programs of every layer."""

    queries_per_tile: int
    decode_keys: int
    """Decodes are cut at multiples of this number of keys, chunks at multiples of `chunk_keys`."""
    chunk_keys: int
    decode_slots: int
    """Parts that run at once, with all KV heads of each: enough to fill the chip."""
    chunk_slots: int
    windows: tuple[Window, ...]
    """Different attention windows of the layers."""

    @classmethod
    def of(
        cls,
        num_heads: int,
        shapes: Iterable[tuple[int, int]],
        dtype: torch.dtype,
        windows: Iterable[Window] = (None,),
    ) -> "Tiling":
        """`shapes` are the KV heads and the head size of each layer that has attention."""
        shapes = list(shapes)
        num_kv_heads = max(heads for heads, _ in shapes)
        return cls(
            min(count_queries(num_heads // heads, size, dtype) for heads, size in shapes),
            max(count_keys(size, dtype, is_chunk=False) for _, size in shapes),
            max(count_keys(size, dtype, is_chunk=True) for _, size in shapes),
            max(1, PROGRAMS_OF_DECODES * NUM_MULTIPROCESSORS // num_kv_heads),
            max(1, PROGRAMS_OF_CHUNKS * NUM_MULTIPROCESSORS // num_kv_heads),
            tuple(windows),
        )


def count_queries(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the queries per tile of a prefill; `group` query heads share a KV head."""
    is_wide = dtype.itemsize > 2
    max_rows = WIDE_CHUNK_ROWS if is_wide else CHUNK_ROWS
    max_bytes = WIDE_CHUNK_BYTES if is_wide else CHUNK_BYTES
    return max(1, min(max_rows, max_bytes // (head_dim * dtype.itemsize)) // group)


def count_keys(head_dim: int, dtype: torch.dtype, *, is_chunk: bool) -> int:
    """Return the keys per step of a program's loop, a power of two."""
    step_bytes = DECODE_KEY_BYTES
    if is_chunk:
        step_bytes = WIDE_CHUNK_KEY_BYTES if dtype.itemsize > 2 else CHUNK_KEY_BYTES
    num_keys = step_bytes // (pad_to_power_of_two(head_dim, MIN_SIDE) * dtype.itemsize)
    return min(max(num_keys, MIN_SIDE), MAX_KEYS)


def pad_to_power_of_two(size: int, minimum: int = 1) -> int:
    """Return the next power of two, at least `minimum`: ranges in a kernel have such sizes."""
    return max(minimum, 1 << (size - 1).bit_length())
