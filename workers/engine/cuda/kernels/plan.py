"""Step plan for the kernels, transferred to the device in one copy.

Attention works on tiles: adjacent queries of one sequence. A decode is a tile of one query, a chunk
of a prefill is cut into several tiles, and one kernel processes both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE_WIDTH = 4
"""Fields of a tile: first row in the batch, number of queries, position of the first query in its
sequence, row of the sequence in the block table."""

# Rows of a tile in a prefill, one per query and query head: enough to fill the matrix units, and
# limited in bytes so that the rows fit into registers. Products of 4-byte types do not use the
# matrix units and need several times as many registers.
CHUNK_ROWS, CHUNK_BYTES = 128, 32 * 2**10
WIDE_CHUNK_ROWS, WIDE_CHUNK_BYTES = 32, 16 * 2**10

# Four programs for each of the 132 multiprocessors of an H100 or H200; smaller chips have fewer.
TARGET_PROGRAMS = 528
MAX_SPLITS = 64

# In int32 elements: parts of the copied buffer begin at multiples of 16 bytes, because Triton would
# compile a second version of a kernel for pointers that are not aligned.
ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Plan of one step, on the device."""

    slot_mapping: Tensor  # [num_tokens] int32: slot of each token's K and V; -1 is not written
    decodes: Tensor  # [num_decodes, TILE_WIDTH] int32; tiles of at most one query
    chunks: Tensor  # [num_chunk_tiles, TILE_WIDTH] int32
    block_table: Tensor  # [num_seqs, max_num_blocks] int32
    num_splits: int  # of each decode's keys, a power of two


class BlockTables:
    """Block tables of the last step as one array, so that only changed lists are converted.

    Most tables do not change in a step, and comparing lists is far cheaper than converting them.
    """

    def __init__(self) -> None:
        self._lists: list[Sequence[int]] = []
        self._array = np.zeros((0, 0), dtype=np.int32)

    def gather(self, tables: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
        """Return the tables as [num_seqs, width]; entries after a table's end are undefined."""
        self._make_room(len(tables), max(width, *map(len, tables)))
        for i, table in enumerate(tables):
            if table != self._lists[i]:
                self._lists[i] = list(table)
                self._array[i, : len(table)] = self._lists[i]
        return self._array[: len(tables), :width]

    def _make_room(self, num_rows: int, width: int) -> None:
        rows, columns = self._array.shape
        if num_rows > rows or width > columns:
            self._lists = [[] for _ in range(max(num_rows, rows))]
            # Twice as wide, so that growing tables do not cause a new array at every block.
            columns = columns if width <= columns else 2 * width
            self._array = np.zeros((len(self._lists), columns), dtype=np.int32)


def plan_for_kernels(
    block_tables: Sequence[Sequence[int]],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int,
    num_kv_heads: int,
    queries_per_tile: int,
    device: torch.device,
    tables: BlockTables | None = None,
) -> KernelPlan:
    """Return the plan of a batch; for the first three arguments see `step_plan.plan_step`.

    `tables` caches the block tables of earlier steps.
    """
    starts = np.asarray(query_start_loc, dtype=np.int64)
    lens = np.asarray(seq_lens, dtype=np.int64)
    num_new = np.diff(starts)
    width = -(-int(lens.max()) // block_size)
    table = (tables or BlockTables()).gather(block_tables, width)
    owners, positions = _expand_counts(num_new)
    positions += (lens - num_new)[owners]
    slot_mapping = table[owners, positions // block_size] * block_size + positions % block_size
    tiles = _cut_tiles(starts[:-1], num_new, lens, queries_per_tile)
    is_decode = num_new[tiles[:, 3]] == 1
    slots, decodes, chunks, table_on_device = _copy_to_device(
        [slot_mapping, tiles[is_decode], tiles[~is_decode], table], device
    )
    num_splits = count_splits(len(decodes), num_kv_heads)
    return KernelPlan(slots, decodes, chunks, table_on_device, num_splits)


def count_queries(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the queries per tile of a prefill; `group` query heads share a KV head."""
    is_wide = dtype.itemsize > 2
    max_rows = WIDE_CHUNK_ROWS if is_wide else CHUNK_ROWS
    max_bytes = WIDE_CHUNK_BYTES if is_wide else CHUNK_BYTES
    return max(1, min(max_rows, max_bytes // (head_dim * dtype.itemsize)) // group)


def count_splits(num_decodes: int, num_kv_heads: int) -> int:
    """Return the number of programs per decode and KV head: enough to fill the chip.

    The lengths are ignored, although short contexts leave some programs idle: a graph is captured
    for all lengths, and each number of splits is a separate kernel.
    """
    num_programs = TARGET_PROGRAMS // max(1, num_decodes * num_kv_heads)
    return 1 << (min(max(num_programs, 1), MAX_SPLITS).bit_length() - 1)


def _cut_tiles(
    starts: NDArray[np.int64],
    num_new: NDArray[np.int64],
    lens: NDArray[np.int64],
    queries_per_tile: int,
) -> NDArray[np.int64]:  # [num_tiles, TILE_WIDTH]
    owners, index = _expand_counts(-(-num_new // queries_per_tile))
    first = index * queries_per_tile
    num_queries = np.minimum(num_new[owners] - first, queries_per_tile)
    position = (lens - num_new)[owners] + first
    return np.stack([starts[owners] + first, num_queries, position, owners], axis=1)


def _expand_counts(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return owners and indexes: for counts [2, 3], [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]


def _copy_to_device(parts: Sequence[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Return the arrays as int32 tensors on the device, transferred in one copy."""
    offsets = np.cumsum([0, *(-(-part.size // ALIGNMENT) * ALIGNMENT for part in parts)])
    packed = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for part, offset in zip(parts, offsets, strict=False):
        host[offset : offset + part.size] = part.ravel()
    on_device = packed.to(device, non_blocking=True)
    return [
        on_device[offset : offset + part.size].view(part.shape)
        for part, offset in zip(parts, offsets.tolist(), strict=False)
    ]
