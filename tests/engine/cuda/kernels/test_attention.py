"""The attention kernels against attention by its definition, sequence by sequence."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.engine.cuda.kernels.attention import paged_attention
from workers.engine.cuda.kernels.plan import KernelPlan, plan_for_kernels
from workers.engine.cuda.kernels.rotary import write_cache
from workers.engine.cuda.kernels.tiling import Tiling
from workers.engine.model import attention as reference
from workers.engine.model.step_plan import plan_step

SCALE = 0.3

# The interpreter computes with numpy, which warns of infinities; to a GPU they are numbers.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@dataclass
class Case:
    """Sequences of a step, each with the tokens cached before it and the tokens it brings."""

    spans: list[tuple[int, int]]
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    num_slots: int = 1
    seed: int = 0
    has_sinks: bool = False


spans = st.lists(
    st.tuples(st.integers(0, 100), st.one_of(st.just(1), st.integers(1, 40))),
    min_size=1,
    max_size=4,
)
cases = st.builds(
    Case,
    spans=spans,
    block_size=st.sampled_from([16, 32, 64]),
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    window=st.sampled_from([None, 1, 7, 32]),
    softcap=st.sampled_from([None, 2.0]),
    num_slots=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 2**31),
    has_sinks=st.booleans(),
)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, case: Case, sinks: Tensor | None
) -> Tensor:
    """In float64; query j of the last ones sees the keys up to its own token, in its window."""
    num_queries, seq_len = len(query), len(key)
    key, value = (x.double().repeat_interleave(case.group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * SCALE
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    behind = torch.arange(seq_len - num_queries, seq_len)[:, None] - torch.arange(seq_len)
    is_visible = (behind >= 0) & (behind < (case.window or seq_len))
    weights = scores.masked_fill(~is_visible, -torch.inf).exp()
    sums = weights.sum(-1, keepdim=True)
    if sinks is not None:
        sums += sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / sums, value)


@dataclass
class Step:
    """Batch of a case; blocks of the pool that no sequence holds are filled with noise."""

    tables: list[list[int]]
    starts: list[int]
    seq_lens: list[int]
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    key: Tensor
    value: Tensor
    expected: Tensor
    sinks: Tensor | None


def make_step(case: Case) -> Step:
    torch.manual_seed(case.seed)
    seq_lens = [past + new for past, new in case.spans]
    counts = [-(-n // case.block_size) for n in seq_lens]
    order = torch.randperm(sum(counts) + 3).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    starts = [0]
    for _, new in case.spans:
        starts.append(starts[-1] + new)
    num_tokens, row = starts[-1], (case.num_kv_heads, case.head_dim)
    shape = (sum(counts) + 3, case.block_size, *row)
    key_cache, value_cache = (torch.randn(shape).to(case.dtype) for _ in range(2))
    query = torch.randn(num_tokens, case.num_kv_heads * case.group, case.head_dim).to(case.dtype)
    key, value = (torch.randn(num_tokens, *row).to(case.dtype) for _ in range(2))
    sinks = torch.randn(query.shape[1]).to(case.dtype) if case.has_sinks else None
    expected = torch.empty(query.shape, dtype=torch.float64)
    for i, (past, _) in enumerate(case.spans):
        rows = slice(starts[i], starts[i + 1])
        past_rows = [cache[tables[i]].flatten(0, 1)[:past] for cache in (key_cache, value_cache)]
        whole = [
            torch.cat([old, new[rows]]) for old, new in zip(past_rows, (key, value), strict=True)
        ]
        expected[rows] = dense_attention(query[rows], whole[0], whole[1], case, sinks)
    return Step(
        tables, starts, seq_lens, query, key_cache, value_cache, key, value, expected, sinks
    )


def make_plan(step: Step, case: Case, device: torch.device) -> KernelPlan:
    shape = (case.num_kv_heads, case.head_dim)
    tiling = Tiling.of(case.num_kv_heads * case.group, [shape], case.dtype, [case.window])
    return plan_for_kernels(
        step.tables,
        step.starts,
        step.seq_lens,
        block_size=case.block_size,
        tiling=replace(tiling, decode_slots=case.num_slots, chunk_slots=case.num_slots),
        device=device,
    )


def run_kernels(step: Step, case: Case, device: torch.device) -> Tensor:
    plan = make_plan(step, case, device)
    caches = step.key_cache.to(device), step.value_cache.to(device)
    write_cache(step.key.to(device), step.value.to(device), *caches, plan.slot_mapping)
    query = step.query.to(device)
    sinks = None if step.sinks is None else step.sinks.to(device)
    return paged_attention(query, *caches, plan, SCALE, case.window, case.softcap, sinks).cpu()


def check(case: Case, device: torch.device) -> None:
    step = make_step(case)
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        run_kernels(step, case, device).double(), step.expected, atol=tolerance, rtol=tolerance
    )


# Not made smaller where it fails: the interpreter is slow.
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(case=cases)
def test_any_batch_equals_attention_by_definition(device: torch.device, case: Case) -> None:
    check(case, device)


@pytest.mark.parametrize(
    "case",
    [
        Case([(0, 1)]),
        Case([(0, 33)], head_dim=128),
        Case([(31, 1), (4, 1), (15, 1)], num_slots=8),
        Case([(5, 1), (0, 7), (13, 13), (100, 1)], num_slots=4),
        Case([(700, 1), (3, 1), (300, 1)], num_slots=20, group=6, head_dim=128),
        Case([(900, 1)], num_slots=60, num_kv_heads=1, head_dim=128),
        Case([(200, 1), (500, 1)], num_slots=64, window=100, num_kv_heads=1),
        Case([(0, 200)], window=20, head_dim=80),
        Case([(300, 5)], num_slots=9, num_kv_heads=1, group=7, head_dim=256),
        Case([(600, 20)], num_slots=9, num_kv_heads=1, group=1, head_dim=256, window=300),
        Case([(130, 70)], softcap=1.5, group=7, dtype=torch.bfloat16),
        Case([(100, 1)], softcap=1.5, group=16, num_kv_heads=1, dtype=torch.float16),
        Case([(5, 1), (0, 7), (13, 13), (100, 1)], num_slots=4, has_sinks=True),
        Case([(200, 1), (3, 1), (0, 40)], num_slots=64, window=20, has_sinks=True),
    ],
    ids=[
        "first token",
        "prompt",
        "ragged decodes",
        "mixed",
        "long and short",
        "more parts than a merge reads at once",
        "parts within the window",
        "prompt longer than the window",
        "chunk in parts",
        "chunk in parts within the window",
        "chunk, soft cap",
        "all heads share, soft cap",
        "mixed, sinks",
        "parts within the window, sinks",
    ],
)
def test_named_shapes_equal_attention_by_definition(device: torch.device, case: Case) -> None:
    check(case, device)


@pytest.mark.parametrize("spans", [[(20, 1), (0, 9), (3, 12)], [(40, 1), (7, 1)]])
def test_the_kernels_and_the_torch_version_agree(
    device: torch.device, spans: list[tuple[int, int]]
) -> None:
    case = Case(spans, num_slots=4)
    step = make_step(case)
    kernels = run_kernels(step, case, device)
    plan = plan_step(
        step.tables,
        step.starts,
        step.seq_lens,
        block_size=case.block_size,
        dtype=case.dtype,
        device=torch.device("cpu"),
    )
    reference.write_cache(step.key_cache, plan.slot_mapping, step.key)
    reference.write_cache(step.value_cache, plan.slot_mapping, step.value)
    torch.testing.assert_close(
        kernels,
        reference.paged_attention(step.query, step.key_cache, step.value_cache, plan, SCALE),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("num_slots", [1, 5])
def test_padding_touches_neither_the_cache_nor_the_other_rows(
    device: torch.device, num_slots: int
) -> None:
    """The plan of three decodes has merges of four; a graph of four has another row."""
    case = Case([(40, 1), (7, 1), (90, 1)], num_slots=num_slots)
    step = make_step(case)
    plan = make_plan(step, case, device)
    no_slot = torch.tensor([-1], dtype=torch.int32, device=device)
    padded = replace(plan, slot_mapping=torch.cat([plan.slot_mapping, no_slot]))
    assert len(padded.decodes[None].merges) == 4
    extra = torch.full((1, *step.key.shape[1:]), torch.nan)
    caches = step.key_cache.to(device), step.value_cache.to(device)
    key, value = (torch.cat([x, extra]).to(device) for x in (step.key, step.value))
    write_cache(key, value, *caches, padded.slot_mapping)
    assert all(cache.isfinite().all() for cache in caches)
    query = torch.cat([step.query, torch.full((1, *step.query.shape[1:]), torch.nan)])
    output = paged_attention(query.to(device), *caches, padded, SCALE)[:3].cpu()
    torch.testing.assert_close(output.double(), step.expected, atol=1e-5, rtol=1e-5)
