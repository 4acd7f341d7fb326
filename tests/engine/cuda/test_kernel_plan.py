"""Step plans of the kernels: index arithmetic, without running a kernel."""

import heapq
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.cuda.kernels.plan import (
    BlockTables,
    KernelPlan,
    TileParts,
    count_parts,
    plan_for_kernels,
)
from workers.engine.cuda.kernels.tiling import Tiling, count_queries
from workers.engine.model.step_plan import Window

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def make_tiling(
    queries_per_tile: int = 3,
    num_keys: int = 2,
    num_slots: int = 1,
    windows: tuple[Window, ...] = (None,),
) -> Tiling:
    return Tiling(queries_per_tile, num_keys, num_keys, num_slots, num_slots, windows)


def make_plan(
    tables: list[list[int]], num_new: list[int], seq_lens: list[int], tiling: Tiling
) -> KernelPlan:
    return plan_for_kernels(
        tables,
        [0, *np.cumsum(num_new).tolist()],
        seq_lens,
        block_size=BLOCK_SIZE,
        tiling=tiling,
        device=CPU,
    )


def test_a_mixed_step() -> None:
    tiling = make_tiling(num_slots=3)
    plan = make_plan([[5, 1], [2, 7], [3]], [1, 5, 1], [6, 8, 1], tiling)
    assert plan.slot_mapping.tolist() == [5, 11, 28, 29, 30, 31, 12]
    assert plan.block_table[0].tolist() == [5, 1]
    assert plan.block_table[2, 0] == 3
    assert plan.num_decodes == 2
    # The first decode has two parts, and the second one has one key.
    assert plan.decodes[None].parts.tolist() == [
        [0, 1, 5, 0, 2, 6, 1, 0],
        [0, 1, 5, 0, 0, 2, 0, 1],
        [6, 1, 0, 2, 0, 1, -1, 1],
    ]
    assert plan.decodes[None].merges.tolist() == [[0, 2, 0, 1], [0, 0, 0, 0]]
    assert plan.decodes[None].num_partials == 2
    # A part of a chunk has at least eight steps of two keys.
    assert plan.chunks[None].parts.tolist() == [
        [4, 2, 6, 1, 0, 8, -1, 1],
        [1, 3, 3, 1, 0, 6, -1, 1],
    ]
    assert plan.chunks[None].merges.shape == (0, 4)
    assert plan.chunks[None].num_partials == 0


def test_every_array_begins_where_triton_takes_it_for_aligned() -> None:
    plan = make_plan([[5, 1], [2, 7], [3]], [1, 5, 1], [6, 8, 1], make_tiling(windows=(None, 3)))
    tiles = [*plan.decodes.values(), *plan.chunks.values()]
    arrays = [plan.block_table, *(each.parts for each in tiles), *(each.merges for each in tiles)]
    assert {array.data_ptr() % 16 for array in arrays} == {plan.slot_mapping.data_ptr() % 16}


spans = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 20)), min_size=1, max_size=6)
windows = st.lists(st.sampled_from([None, 1, 5, 64]), min_size=1, max_size=2, unique=True)


@given(spans, st.integers(1, 7), st.sampled_from([1, 2, 16]), st.integers(1, 40), windows)
def test_parts_hold_every_token_and_every_visible_key_once(
    spans: list[tuple[int, int]],
    queries_per_tile: int,
    num_keys: int,
    num_slots: int,
    windows: list[Window],
) -> None:
    num_new, seq_lens = [new for _, new in spans], [past + new for past, new in spans]
    tables = [[i * 1000 + j for j in range(120)] for i in range(len(spans))]
    tiling = make_tiling(queries_per_tile, num_keys, num_slots, tuple(windows))
    plan = make_plan(tables, num_new, seq_lens, tiling)
    tokens = [(i, past + j) for i, (past, new) in enumerate(spans) for j in range(new)]
    assert plan.num_decodes == num_new.count(1)
    assert plan.slot_mapping.tolist() == [tables[i][t // 4] * 4 + t % 4 for i, t in tokens]
    for window in windows:
        owners: dict[int, tuple[int, int]] = {}
        for is_chunk, by_window in enumerate((plan.decodes, plan.chunks)):
            if window in by_window:
                tiles = check_tiles(by_window[window], window, num_keys, num_slots)
                assert all((num_new[tile[3]] > 1) == is_chunk for tile in tiles)
                for row, num_queries, position, owner in tiles:
                    assert num_queries <= queries_per_tile
                    for j in range(num_queries):
                        assert row + j not in owners
                        owners[row + j] = (owner, position + j)
        assert [owners[row] for row in range(len(tokens))] == tokens


def check_tiles(
    tiles: TileParts, window: Window, num_keys: int, num_slots: int
) -> list[tuple[int, ...]]:
    """Check the parts and the merges of tiles, and return the tiles."""
    parts = [part for part in tiles.parts.tolist() if part[1]]
    lengths = [part[5] - part[4] for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    of_tile = defaultdict(list)
    for part in parts:
        of_tile[tuple(part[:4])].append(part)
    assert len(parts) <= count_parts(len(of_tile), num_slots) < len(of_tile) + num_slots
    merges, results = {}, []
    for (row, num_queries, position, _), own in of_tile.items():
        own.sort(key=lambda part: part[4])
        assert [part[7] for part in own] == [1, *[0] * (len(own) - 1)]
        first_visible = 0 if window is None else max(0, position - window + 1)
        assert first_visible - num_keys < own[0][4] <= first_visible
        assert [part[4] for part in own[1:]] == [part[5] for part in own[:-1]]
        assert all(part[4] % num_keys == 0 and part[4] < part[5] for part in own)
        assert own[-1][5] == position + num_queries
        steps = [-(-(part[5] - part[4]) // num_keys) for part in own]
        assert max(steps) - min(steps) <= 1
        if len(own) == 1:
            assert own[0][6] == -1
        else:
            results += [part[6] for part in own]
            merges[row] = [own[0][6], len(own), row, num_queries]
            assert [part[6] for part in own] == list(range(own[0][6], own[0][6] + len(own)))
    assert sorted(results) == list(range(tiles.num_partials))
    assert [merge for merge in tiles.merges.tolist() if merge[1]] == [
        merges[row] for row in sorted(merges)
    ]
    return list(of_tile)


@pytest.mark.parametrize(
    ("spans", "num_heads"),
    [
        ([(4095, 1)] * 64, 28),
        ([(600, 1)] * 63 + [(32767, 1)], 28),
        ([(1023, 1)] * 256, 28),
        ([(32767, 1)], 28),
        ([(32640, 128)], 28),
        ([(4095, 1)] * 64, 12),
        ([(32767, 1)], 12),
    ],
)
def test_the_longest_first_fill_the_chip(spans: list[tuple[int, int]], num_heads: int) -> None:
    """A program takes time in proportion to its keys; the ideal is equal work for all slots."""
    tiling = Tiling.of(num_heads, [(4 if num_heads == 28 else 2, 128)], torch.bfloat16)
    tables = [[0] * 8192] * len(spans)
    plan = make_plan(tables, [new for _, new in spans], [sum(span) for span in spans], tiling)
    (tiles,) = (plan.decodes or plan.chunks).values()
    num_slots = tiling.decode_slots if plan.decodes else tiling.chunk_slots
    busy = [0] * num_slots
    lengths = [part[5] - part[4] for part in tiles.parts.tolist()]
    for length in lengths:
        heapq.heapreplace(busy, busy[0] + length)
    assert max(busy) <= 1.15 * sum(lengths) / num_slots


@given(st.integers(1, 600), st.integers(1, 200))
def test_a_graph_has_room_for_the_parts_of_each_of_its_batches(num: int, num_slots: int) -> None:
    assert count_parts(num, num_slots) % num_slots == 0
    bucket = 1 << (num - 1).bit_length()
    assert count_parts(num, num_slots) <= count_parts(bucket, num_slots) < bucket + num_slots


tables = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=5)


@given(st.lists(tables, max_size=8))
def test_block_tables_of_a_step_know_nothing_of_the_steps_before(
    steps: list[list[list[int]]],
) -> None:
    memo = BlockTables()
    for step in steps:
        width = max(map(len, step))
        for row, table in zip(memo.gather(step, width), step, strict=True):
            assert row[: len(table)].tolist() == table


def test_a_table_that_is_changed_in_place_is_read_again() -> None:
    memo, table = BlockTables(), [4, 5]
    memo.gather([table], 2)
    table[0] = 6
    assert memo.gather([table], 2).tolist() == [[6, 5]]


def test_a_tile_of_a_prefill_has_its_rows_full() -> None:
    assert count_queries(1, 128, torch.bfloat16) == 128
    assert count_queries(6, 128, torch.bfloat16) == 21
    assert count_queries(2, 256, torch.bfloat16) == 32
    assert count_queries(128, 256, torch.float32) == 1


def test_layers_of_unequal_heads_share_their_tiles() -> None:
    """The tiles fit into the programs of both layers, and the cuts are at steps of both."""
    tiling = Tiling.of(8, [(2, 256), (4, 64)], torch.bfloat16, [None, 9])
    assert tiling == Tiling(16, 64, 128, 132, 33, (None, 9))
