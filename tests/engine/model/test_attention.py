"""Paged attention against plain dense causal attention, sequence by sequence."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.doge.configuration_doge import DogeConfig
from transformers.models.doge.modeling_doge import DogeForCausalLM

from shared.models.language import LanguageAdapter
from tests.engine.model.test_parity import build
from workers.engine.loader import warm_up
from workers.engine.model.attention import paged_attention, write_cache
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.step_plan import StepPlan, Window, plan_step

HEAD_DIM = 8
SCALE = 0.3


@dataclass
class Case:
    """Sequences of a step: tokens cached before it, and new tokens."""

    spans: list[tuple[int, int]]
    block_size: int
    num_kv_heads: int
    group: int
    seed: int
    window: Window = None
    softcap: float | None = None
    has_sinks: bool = False
    is_ordered: bool = False
    """Whether the blocks of a sequence are consecutive."""

    @property
    def sinks(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.seed)
        num_heads = self.num_kv_heads * self.group
        return torch.randn(num_heads, generator=generator) if self.has_sinks else None


spans = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), max_size=6
)
cases = st.builds(
    Case,
    spans=spans.filter(bool),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    window=st.one_of(st.none(), st.integers(1, 70)),
    softcap=st.sampled_from([None, None, 0.5, 20.0]),
    has_sinks=st.booleans(),
    is_ordered=st.booleans(),
)


def dense_attention(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """By definition: query row j of the last ones sees the keys up to its own token, and of these
    the last ones that the window has room for."""
    num_queries, seq_len = len(query), len(key)
    output = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for j in range(num_queries):
        visible = seq_len - num_queries + j + 1
        first = 0 if case.window is None else max(0, visible - case.window)
        for head in range(query.shape[1]):
            scores = key[first:visible, head // group] @ query[j, head] * SCALE
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            weights = scores.exp()
            sink = 0.0 if case.sinks is None else case.sinks[head].exp()
            output[j, head] = weights @ value[first:visible, head // group]
            output[j, head] /= weights.sum() + sink
    return output


def run_paged(case: Case) -> tuple[Tensor, Tensor]:
    """The paged answer and the dense one, over blocks in a pool full of noise."""
    torch.manual_seed(case.seed)
    seq_lens = [past + new for past, new in case.spans]
    counts = [-(-n // case.block_size) for n in seq_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks).tolist()
    if case.is_ordered:
        # Sequences have consecutive blocks, after a block of noise.
        order = [*reversed(range(1, num_blocks))]
    tables = [[order.pop() for _ in range(count)] for count in counts]
    shape = (num_blocks, case.block_size, case.num_kv_heads, HEAD_DIM)
    caches = torch.randn(shape), torch.randn(shape)
    starts = [0]
    for _, new in case.spans:
        starts.append(starts[-1] + new)
    query = torch.randn(starts[-1], case.num_kv_heads * case.group, HEAD_DIM)
    expected = torch.empty_like(query)
    fresh = [torch.empty(starts[-1], case.num_kv_heads, HEAD_DIM) for _ in caches]
    for i, (past, new) in enumerate(case.spans):
        key, value = (torch.randn(past + new, case.num_kv_heads, HEAD_DIM) for _ in caches)
        rows = slice(starts[i], starts[i + 1])
        expected[rows] = dense_attention(case, query[rows], key, value)
        for cache, new_rows, source in zip(caches, fresh, (key, value), strict=True):
            new_rows[rows] = source[past:]
            for t in range(past):
                cache[tables[i][t // case.block_size], t % case.block_size] = source[t]
    plan = make_plan(tables, starts, seq_lens, case.block_size, case.window)
    for cache, new_rows in zip(caches, fresh, strict=True):
        write_cache(cache, plan.slot_mapping, new_rows)
    window, softcap = case.window, case.softcap
    paged = paged_attention(query, *caches, plan, SCALE, window, softcap, case.sinks)
    return paged, expected


def make_plan(
    tables: list[list[int]],
    starts: list[int],
    seq_lens: list[int],
    block_size: int,
    window: Window = None,
) -> StepPlan:
    return plan_step(
        tables,
        starts,
        seq_lens,
        block_size=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        windows=[window],
    )


@given(cases)
def test_mixed_batch_over_blocks_equals_dense_attention(case: Case) -> None:
    paged, dense = run_paged(case)
    torch.testing.assert_close(paged, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 17, 300])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(0, 33)],
        [(31, 1), (4, 1), (15, 1)],
        [(16, 1), (16, 1)],
        [(16, 16)],
        [(5, 1), (0, 7), (13, 13), (40, 1)],
        [(700, 1), (3, 1), (255, 1), (256, 1), (0, 5), (300, 1)],
        [(300, 1), (400, 1)],
        [(2, 1), (900, 1)],
    ],
    ids=[
        "first token",
        "prompt",
        "ragged decodes",
        "even decodes",
        "chunk at a border",
        "mixed",
        "decodes of all lengths",
        "long decodes",
        "a short and a long decode",
    ],
)
def test_named_shapes_equal_dense_attention(spans: list[tuple[int, int]], window: Window) -> None:
    paged, dense = run_paged(Case(spans, 16, num_kv_heads=2, group=3, seed=0, window=window))
    torch.testing.assert_close(paged, dense, atol=1e-5, rtol=1e-5)


def test_a_long_decode_does_not_pad_the_short_ones() -> None:
    tables = [list(range(100)), [100], [101]]
    plan = make_plan(tables, [0, 1, 2, 3], [1600, 9, 12], 16)
    decodes = plan.reads[None].decodes
    assert sorted((d.num_decodes, d.max_len) for d in decodes) == [(1, 1600), (2, 12)]


def test_a_window_reads_its_own_blocks_only() -> None:
    """A decode reads the tokens [1580, 1600), a chunk [36, 60). A block has 16 tokens."""
    plan = make_plan([list(range(100)), [100, 101, 102, 103]], [0, 1, 6], [1600, 60], 16, 20)
    (decode,), (chunk,) = plan.reads[20].decodes, plan.reads[20].chunks
    assert (decode.blocks, chunk.blocks) == (slice(98, 100), slice(102, 104))
    (alike,) = make_plan([[0], [1]], [0, 1, 2], [7, 7], 16, 20).reads[20].decodes
    assert alike.mask is None


def test_layers_share_a_plan_only_with_layers_of_the_same_window() -> None:
    plan = plan_step(
        [[0, 1, 2]],
        [0, 1],
        [12],
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        windows={None, 4},
    )
    assert plan.reads.keys() == {None, 4}
    assert [plan.reads[w].decodes[0].max_len for w in (None, 4)] == [12, 4]


def test_blocks_allocated_ahead_are_not_read() -> None:
    torch.manual_seed(0)
    key_cache, value_cache = torch.randn(2, 8, 4, 2, HEAD_DIM)
    query = torch.randn(4, 2, HEAD_DIM)
    exact = make_plan([[5, 1], [2]], [0, 1, 4], [6, 3], 4)
    ahead = make_plan([[5, 1, 7, 6], [2, 4]], [0, 1, 4], [6, 3], 4)
    torch.testing.assert_close(
        paged_attention(query, key_cache, value_cache, exact, SCALE),
        paged_attention(query, key_cache, value_cache, ahead, SCALE),
    )


def test_a_write_touches_its_slots_only() -> None:
    cache = torch.zeros(4, 2, 1, HEAD_DIM)
    plan = make_plan([[3, 0]], [0, 2], [3], 2)
    write_cache(cache, plan.slot_mapping, torch.ones(2, 1, HEAD_DIM))
    assert cache[..., 0].nonzero()[:, :2].tolist() == [[0, 0], [3, 1]]


def test_a_short_sequence_is_padded_with_its_own_blocks() -> None:
    """Blocks of other sequences may hold NaN, which would pass a mask."""
    plan = plan_step(
        [[3], [5, 7]],
        [0, 1, 2],
        [2, 7],
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    (decodes,) = plan.reads[None].decodes
    assert isinstance(decodes.blocks, torch.Tensor)
    assert decodes.blocks.view(2, -1).tolist() == [[3, 3], [5, 7]]


TINY: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_no_setting_of_attention_is_ignored() -> None:
    """The layer makes a mask from values that are zero before training."""
    model = FlatModel(LanguageAdapter(DogeForCausalLM(DogeConfig(**TINY)).eval()))
    with pytest.raises(NotImplementedError, match="attention_mask of DogeAttention"):
        warm_up(model, 8)


@pytest.mark.parametrize(("value", "is_refused"), [(torch.zeros(1), True), (None, False)])
def test_an_unknown_argument_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: Tensor | None, is_refused: bool
) -> None:
    llama = build("llama").eval()
    layer: Any = llama.get_submodule("model.layers.0.self_attn")
    forward = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda **inputs: forward(**inputs, block_indices=value), raising=False
    )
    model = FlatModel(LanguageAdapter(llama))
    if is_refused:
        with pytest.raises(NotImplementedError, match="block_indices of LlamaAttention"):
            warm_up(model, 8)
    else:
        warm_up(model, 8)
