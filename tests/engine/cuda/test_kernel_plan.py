"""Step plans of the kernels: index arithmetic, without running a kernel."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.cuda.kernels.plan import (
    MAX_SPLITS,
    BlockTables,
    KernelPlan,
    count_queries,
    count_splits,
    plan_for_kernels,
)

CPU = torch.device("cpu")


def make_plan(
    tables: list[list[int]],
    num_new: list[int],
    seq_lens: list[int],
    block_size: int = 4,
    queries_per_tile: int = 3,
) -> KernelPlan:
    return plan_for_kernels(
        tables,
        [0, *np.cumsum(num_new).tolist()],
        seq_lens,
        block_size=block_size,
        num_kv_heads=2,
        queries_per_tile=queries_per_tile,
        device=CPU,
    )


def test_a_mixed_step() -> None:
    plan = make_plan([[5, 1], [2, 7], [3]], [1, 5, 1], [6, 8, 1])
    assert plan.slot_mapping.tolist() == [5, 11, 28, 29, 30, 31, 12]
    assert plan.decodes.tolist() == [[0, 1, 5, 0], [6, 1, 0, 2]]
    assert plan.chunks.tolist() == [[1, 3, 3, 1], [4, 2, 6, 1]]
    assert plan.block_table[0].tolist() == [5, 1]
    assert plan.block_table[2, 0] == 3


def test_every_part_begins_where_triton_takes_it_for_aligned() -> None:
    plan = make_plan([[5, 1], [2, 7], [3]], [1, 5, 1], [6, 8, 1])
    parts = (plan.slot_mapping, plan.decodes, plan.chunks, plan.block_table)
    assert {part.data_ptr() % 16 for part in parts} == {plan.slot_mapping.data_ptr() % 16}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(1, 7),
)
def test_tiles_hold_every_token_once(spans: list[tuple[int, int]], queries_per_tile: int) -> None:
    num_new, seq_lens = [new for _, new in spans], [past + new for past, new in spans]
    tables = [[i * 100 + j for j in range(20)] for i in range(len(spans))]
    plan = make_plan(tables, num_new, seq_lens, queries_per_tile=queries_per_tile)
    owners = {}
    for row, num_queries, position, owner in [*plan.decodes.tolist(), *plan.chunks.tolist()]:
        assert num_queries <= queries_per_tile
        for j in range(num_queries):
            assert row + j not in owners
            owners[row + j] = (owner, position + j)
    expected = [(i, past + j) for i, (past, new) in enumerate(spans) for j in range(new)]
    assert [owners[row] for row in range(len(expected))] == expected
    slots = [tables[i][t // 4] * 4 + t % 4 for i, t in expected]
    assert plan.slot_mapping.tolist() == slots


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


def test_splits_fill_the_chip_and_no_more() -> None:
    assert [count_splits(n, 2) for n in (1, 4, 64, 256, 4096)] == [MAX_SPLITS, 64, 4, 1, 1]


def test_a_tile_of_a_prefill_has_its_rows_full() -> None:
    assert count_queries(1, 128, torch.bfloat16) == 128
    assert count_queries(6, 128, torch.bfloat16) == 21
    assert count_queries(2, 256, torch.bfloat16) == 32
    assert count_queries(128, 256, torch.float32) == 1
