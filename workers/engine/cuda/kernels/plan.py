"""Step plan for the kernels, transferred to the device in one copy.

Attention works on tiles: adjacent queries of one sequence. A decode is a tile of one query, a chunk
of a prefill is cut into several tiles, and one kernel processes both. The keys of long tiles are
cut into parts of nearly equal length, so that one long context does not occupy one program while
the rest of the chip is idle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.kernels.tiling import Tiling, pad_to_power_of_two
from workers.engine.model.step_plan import Window
from workers.engine.transfers import upload_parts

PART_WIDTH = 8
"""Fields of a part: first row in the batch, number of queries, position of the first query in its
sequence, row of the sequence in the block table, first key, end of the keys, number of its partial
result or -1 for the output, and 1 for the first part of a tile. Padding has no queries."""

MERGE_WIDTH = 4
"""Fields of a merge, for a tile of several parts: first partial result, number of them, first row
in the batch, number of queries. Padding has no results."""

# A part of a chunk is no shorter than this number of steps: 8 of them take about as long as writing
# and merging its result.
MIN_CHUNK_STEPS = 8


@dataclass(frozen=True, slots=True)
class TileParts:
    """Tiles of a step, cut for the layers with one window, the longest part first."""

    parts: Tensor  # [num_parts, PART_WIDTH] int32
    merges: Tensor  # [num_merges, MERGE_WIDTH] int32
    num_partials: int
    """Number of partial results, at least."""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Plan of one step, on the device. Decodes and chunks without any tile have no windows."""

    slot_mapping: Tensor  # [num_tokens] int32: slot of each token's K and V; -1 is not written
    block_table: Tensor  # [num_seqs, max_num_blocks] int32
    num_decodes: int
    decodes: Mapping[Window, TileParts]  # tiles of one query
    chunks: Mapping[Window, TileParts]


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
    tiling: Tiling,
    device: torch.device,
    tables: BlockTables | None = None,
) -> KernelPlan:
    """Return the plan of a batch; for the first three arguments see `step_plan.plan_step`.

    `tables` caches the block tables of earlier steps.
    """
    starts = np.asarray(query_start_loc, dtype=np.int64)
    lens = np.asarray(seq_lens, dtype=np.int64)
    num_new = starts[1:] - starts[:-1]
    width = -(-int(lens.max()) // block_size)
    table = (tables or BlockTables()).gather(block_tables, width)
    owners, positions = _expand_counts(num_new)
    positions += (lens - num_new)[owners]
    blocks, offsets = np.divmod(positions, block_size)
    slot_mapping = (table[owners, blocks] * block_size + offsets).astype(np.int32)
    sequences = np.array([starts[:-1], num_new, lens - num_new, np.arange(len(lens))]).T
    is_decode = num_new == 1
    decode_tiles, chunks_of = sequences[is_decode], sequences[~is_decode]
    decodes = _cut_decodes(decode_tiles, tiling) if len(decode_tiles) else {}
    chunks = _cut_chunks(chunks_of, tiling) if len(chunks_of) else {}
    cuts = [*decodes.values(), *chunks.values()]
    arrays = [slot_mapping, table, *(array for cut in cuts for array in cut[:2])]
    slots, table_on_device, *rest = upload_parts(arrays, device)
    on_device = iter(rest)

    def place(cuts: Mapping[Window, _Cut]) -> dict[Window, TileParts]:
        return {
            window: TileParts(next(on_device), next(on_device), cut.num_partials)
            for window, cut in cuts.items()
        }

    return KernelPlan(slots, table_on_device, len(decode_tiles), place(decodes), place(chunks))


def count_parts(num_tiles: int, num_slots: int) -> int:
    """Return the limit of parts: `num_slots`, or its next multiple that gives each tile a part."""
    return -(-num_tiles // num_slots) * num_slots


class _Cut(NamedTuple):
    """`TileParts` on the host."""

    parts: NDArray[np.int32]
    merges: NDArray[np.int32]
    num_partials: int


def _cut_decodes(tiles: NDArray[np.int64], tiling: Tiling) -> dict[Window, _Cut]:
    """Cut the tiles of decodes by window, padded to the sizes that a graph of them has."""
    num_rows = pad_to_power_of_two(len(tiles))
    num_parts = count_parts(num_rows, tiling.decode_slots)
    cuts = {}
    for window in tiling.windows:
        cut = _cut_keys(tiles, window, tiling.decode_keys, tiling.decode_slots)
        parts = np.zeros((num_parts, PART_WIDTH), dtype=np.int32)
        merges = np.zeros((num_rows, MERGE_WIDTH), dtype=np.int32)
        parts[: len(cut.parts)], merges[: len(cut.merges)] = cut.parts, cut.merges
        cuts[window] = _Cut(parts, merges, cut.num_partials)
    return cuts


def _cut_chunks(sequences: NDArray[np.int64], tiling: Tiling) -> dict[Window, _Cut]:
    tiles = _cut_tiles(sequences, tiling.queries_per_tile)
    return {
        window: _cut_keys(tiles, window, tiling.chunk_keys, tiling.chunk_slots, MIN_CHUNK_STEPS)
        for window in tiling.windows
    }


def _cut_keys(
    tiles: NDArray[np.int64],
    window: Window,
    num_keys: int,
    num_slots: int,
    min_steps: int = 1,
) -> _Cut:
    """Cut the visible keys of each tile into nearly equal parts, at multiples of `num_keys`.

    No part is longer than the smallest length with which there are at most `count_parts` parts.
    """
    ends = tiles[:, 2] + tiles[:, 1]
    begins = ends * 0
    if window is not None:
        begins = np.maximum(tiles[:, 2] - window + 1, 0) // num_keys
    num_steps = -(-ends // num_keys) - begins
    max_parts = count_parts(len(tiles), num_slots)
    counts = -(-num_steps // _find_length(num_steps, max_parts, min_steps))
    is_split = counts > 1
    num_results = counts * is_split
    ends_of_results = num_results.cumsum()
    firsts = ends_of_results - num_results
    merges = np.empty((len(tiles), MERGE_WIDTH), dtype=np.int32)
    merges[:, 0], merges[:, 1], merges[:, 2:] = firsts, counts, tiles[:, :2]
    owners, index = _expand_counts(counts)
    columns = np.array([begins, ends, num_steps, counts, np.where(is_split, firsts, -1)])
    begins, ends, num_steps, counts, results = columns[:, owners]
    lows = (begins + index * num_steps // counts) * num_keys
    highs = np.minimum((begins + (index + 1) * num_steps // counts) * num_keys, ends)
    parts = np.empty((len(owners), PART_WIDTH), dtype=np.int32)
    parts[:, :4] = tiles[owners]
    parts[:, 4], parts[:, 5], parts[:, 6], parts[:, 7] = lows, highs, results + index, index == 0
    order = (lows - highs).argsort(kind="stable")
    return _Cut(parts[order], merges[is_split], int(ends_of_results[-1]))


def _find_length(num_steps: NDArray[np.int64], max_parts: int, shortest: int) -> int:
    """Return the smallest length, at least `shortest`, at which `max_parts` parts suffice."""
    total = int(np.add.reduce(num_steps))
    # Each tile has less than one part more than its share of `total`.
    num_spare = max_parts - len(num_steps)
    low, high = max(shortest, -(-total // max_parts)), int(num_steps.max())
    if num_spare:
        high = min(high, -(-total // num_spare))
    while low < high:
        middle = (low + high) // 2
        if np.add.reduce(-(-num_steps // middle)) <= max_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _cut_tiles(sequences: NDArray[np.int64], queries_per_tile: int) -> NDArray[np.int64]:
    """Cut sequences into tiles. Both have the first four fields of a part."""
    owners, index = _expand_counts(-(-sequences[:, 1] // queries_per_tile))
    tiles, first = sequences[owners], index * queries_per_tile
    tiles[:, 0] += first
    tiles[:, 1] = np.minimum(tiles[:, 1] - first, queries_per_tile)
    tiles[:, 2] += first
    return tiles


def _expand_counts(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return owners and indexes: for counts [2, 3], [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]."""
    owners = np.arange(len(counts)).repeat(counts)
    return owners, np.arange(len(owners)) - (counts.cumsum() - counts)[owners]
