"""What the kernels must know of a step, on the device after one copy.

Attention goes by tiles: some queries of one sequence that stand side by side. A decode is a tile of
one query, a chunk of a prefill is cut into as many as it needs, and one kernel reads both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE_WIDTH = 4
"""Of a tile: its first row in the batch, its number of queries, the position of the first of them
in its sequence, and the row of its sequence in the block table."""

# Rows of a tile in prefill, one for each query and query head: what fills the matrix units, as long
# as the rows are no larger than registers have room for.
CHUNK_ROWS = 128
CHUNK_BYTES = 32 * 2**10

# Four for each of the 132 multiprocessors of an H100 or H200; smaller chips have fewer to fill.
PROGRAMS_WANTED = 528
MAX_SPLITS = 64

# Parts of the copied buffer begin at multiples of 16 bytes: Triton compiles a kernel once more for
# a pointer that does not.
ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class KernelPlan:
    slots: Tensor  # [num_tokens] int32: where K and V of each token go; -1 goes nowhere
    decodes: Tensor  # [num_decodes, TILE_WIDTH] int32; tiles of one query, or of none
    chunks: Tensor  # [num_chunk_tiles, TILE_WIDTH] int32
    block_table: Tensor  # [num_seqs, max_num_blocks] int32
    num_splits: int  # of each decode's keys, a power of two


class BlockTables:
    """Block tables as one array, of which a step reads only those lists that have changed.

    Most are as they were in the step before, and to compare lists is far cheaper than to convert
    them.
    """

    def __init__(self) -> None:
        self._lists: list[Sequence[int]] = []
        self._array = np.zeros((0, 0), dtype=np.int32)

    def gather(self, tables: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
        """[num_seqs, width]; behind the end of a table anything may stand."""
        self._make_room(len(tables), max(width, *(len(table) for table in tables)))
        for i, table in enumerate(tables):
            if table != self._lists[i]:
                self._lists[i] = list(table)
                self._array[i, : len(table)] = self._lists[i]
        return self._array[: len(tables), :width]

    def _make_room(self, num_rows: int, width: int) -> None:
        rows, columns = self._array.shape
        if num_rows > rows or width > columns:
            self._lists = [[] for _ in range(max(num_rows, rows))]
            # Twice as wide, so that growing tables do not start anew at every block.
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
    """As `attention.plan_step`. `tables` are those of the steps before."""
    starts = np.asarray(query_start_loc, dtype=np.int64)
    lens = np.asarray(seq_lens, dtype=np.int64)
    num_new = np.diff(starts)
    width = -(-int(lens.max()) // block_size)
    table = (tables or BlockTables()).gather(block_tables, width)
    owners, positions = _spread(num_new)
    positions += (lens - num_new)[owners]
    slots = table[owners, positions // block_size] * block_size + positions % block_size
    tiles = _cut(starts[:-1], num_new, lens, queries_per_tile)
    is_decode = num_new[tiles[:, 3]] == 1
    decodes, chunks = tiles[is_decode], tiles[~is_decode]
    copied = _copy([slots, decodes, chunks, table], device)
    return KernelPlan(
        slots=copied[0],
        decodes=copied[1],
        chunks=copied[2],
        block_table=copied[3],
        num_splits=count_splits(len(decodes), num_kv_heads),
    )


def count_queries(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Queries in a tile of a prefill; `group` query heads share a KV head."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (head_dim * dtype.itemsize)) // group)


def count_splits(num_decodes: int, num_kv_heads: int) -> int:
    """How many programs share the keys of one decode and KV head: enough to fill the chip.

    Not by the lengths, though short contexts leave some idle: a graph is captured for all lengths,
    and each number is a kernel of its own.
    """
    wanted = PROGRAMS_WANTED // max(1, num_decodes * num_kv_heads)
    return 1 << (min(max(wanted, 1), MAX_SPLITS).bit_length() - 1)


def _cut(
    starts: NDArray[np.int64],
    num_new: NDArray[np.int64],
    lens: NDArray[np.int64],
    queries_per_tile: int,
) -> NDArray[np.int64]:  # [num_tiles, TILE_WIDTH]
    owners, index = _spread(-(-num_new // queries_per_tile))
    first = index * queries_per_tile
    num_queries = np.minimum(num_new[owners] - first, queries_per_tile)
    position = (lens - num_new)[owners] + first
    return np.stack([starts[owners] + first, num_queries, position, owners], axis=1)


def _spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For counts [2, 3]: whose each one is, [0, 0, 1, 1, 1], and which, [0, 1, 0, 1, 2]."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]


def _copy(parts: Sequence[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """The same as int32 tensors, by one copy."""
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
