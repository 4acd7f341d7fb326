"""Draws from ranked tokens equal the draws of a plain definition, which sorts all tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.protocol.sampling import SamplingParams
from tests.engine.sampling.test_sampler import filters_of, random_logits, sequence_of
from workers.engine.sampling import ranked as ranked_module
from workers.engine.sampling.ranked import draw_filtered, rank
from workers.engine.sampling.sampler import sample, uniform
from workers.engine.sampling.truncation import Filters, to_units, unnormalized_probs

pytestmark = pytest.mark.usefixtures("one_thread")


POINTS = [*(i / 64 for i in range(64)), 1 - 2.0**-52]


def weights_of(logits: Tensor, params: SamplingParams) -> list[float]:
    temperature = torch.tensor([[params.temperature]])
    return unnormalized_probs(logits[None], logits.max()[None, None], temperature)[0].tolist()


def units_of(weights: list[float]) -> list[int]:
    units: list[int] = to_units(torch.tensor(weights)).tolist()
    return units


def draw_plainly(logits: Tensor, params: SamplingParams, point: float) -> int:
    """Return the token that the filters, one after the other, and the point choose."""
    weights = weights_of(logits, params)
    candidates = [w for w in weights if w >= float(torch.tensor(params.min_p))]
    candidates.sort(reverse=True)
    if params.top_k:
        candidates = [
            w for w in candidates if w >= candidates[min(params.top_k, len(candidates)) - 1]
        ]
    if params.top_p < 1:
        units = units_of(candidates)
        target = min(math.ceil(float(sum(units)) * params.top_p), sum(units))
        nucleus = next(i for i in range(len(candidates)) if sum(units[: i + 1]) >= target)
        candidates = [w for w in candidates if w >= candidates[nucleus]]
    units = [
        u if w >= candidates[-1] else 0 for w, u in zip(weights, units_of(weights), strict=True)
    ]
    offset = min(int(sum(units) * point), sum(units) - 1)
    return next(i for i in range(len(units)) if sum(units[: i + 1]) > offset)


def top_p_at(logits: Tensor, temperature: float, num_tokens: int) -> float:
    """Return the mass of the most probable tokens: the least error in it moves the threshold."""
    units = sorted(units_of(weights_of(logits, SamplingParams(temperature=temperature))))[::-1]
    return sum(units[:num_tokens]) / sum(units)


def make_row(size: int, num_levels: int, has_gap: bool, seed: int) -> Tensor:
    """Return logits with many ties or, for 0 levels, with none."""
    generator = torch.Generator().manual_seed(seed)
    row = 2 * torch.randn(size, generator=generator)
    if num_levels:
        row = torch.randint(num_levels, (size,), generator=generator).float()
    # Tokens with such low logits have no units.
    row[torch.rand(size, generator=generator) < 0.7 * has_gap] -= 60
    return row


rows = st.builds(
    make_row, st.integers(1, 60), st.integers(0, 9), st.booleans(), st.integers(0, 1 << 30)
)


@given(
    logits=rows,
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 8, 9, 30, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.05]) | st.integers(1, 12),
    shift=st.sampled_from([-1e-9, 0.0, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.02, 0.3, 1.0]),
)
def test_a_draw_follows_the_plain_definition(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    shift: float,
    min_p: float,
) -> None:
    if isinstance(top_p, int):
        top_p = min(1.0, top_p_at(logits, temperature, top_p) + shift)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    check(logits, params)


@pytest.mark.parametrize("seed", range(60))
def test_mass_counts_the_tokens_that_other_filters_leave(seed: int) -> None:
    """These are more tokens than are ranked, and fewer than all."""
    logits = make_row(60, 0, False, seed)
    check(logits, SamplingParams(top_k=9, top_p=0.8))
    check(logits, SamplingParams(min_p=0.05, top_p=0.8))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shift", [-1e-9, 0, 1e-9])
def test_a_threshold_between_the_bounds_of_the_mass_is_exact(seed: int, shift: float) -> None:
    logits = make_row(60, 0, False, seed)
    check(logits, SamplingParams(top_p=top_p_at(logits, 1.0, 3) + shift))


def check(logits: Tensor, params: SamplingParams) -> None:
    """Compare draws where 8 tokens are ranked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked_module, "NUM_RANKED", 8)
        patch.setattr(ranked_module, "GROUP_SIZE", 4)
        filters = filters_of(params, len(logits))
        repeated = logits.expand(len(POINTS), -1)
        drawn = draw_filtered(
            repeated,
            rank(repeated),
            Filters(*(column.expand(len(POINTS), -1) for column in filters)),
            torch.tensor(POINTS, dtype=torch.float64),
        )
    assert drawn.tolist() == [draw_plainly(logits, params, point) for point in POINTS]


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.2),
        SamplingParams(top_k=40, top_p=0.8),
        SamplingParams(top_k=700),
        SamplingParams(min_p=0.02),
    ],
)
def test_rows_of_a_large_vocabulary_are_drawn_together_as_each_by_itself(
    params: SamplingParams, spread: float
) -> None:
    """The vocabulary is no multiple of the size of a group."""
    logits = random_logits(3, 4, 3_001) * spread
    sequences = [sequence_of(params, choice=choice) for choice in range(4)]
    points = [uniform(7, choice, 0) for choice in range(4)]
    expected = [draw_plainly(row, params, p) for row, p in zip(logits, points, strict=True)]
    assert sample(logits, sequences) == expected


@given(row=rows)
def test_ranked_tokens_are_the_greatest_in_descending_order(row: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked_module, "NUM_RANKED", 8)
        patch.setattr(ranked_module, "GROUP_SIZE", 4)
        ranked = rank(row[None])
    assert ranked.logits[0].tolist() == sorted(row.tolist())[::-1][:8]
    assert row[ranked.token_ids[0]].tolist() == ranked.logits[0].tolist()
    assert len(set(ranked.token_ids[0].tolist())) == min(8, len(row))


def test_a_value_that_is_no_number_ranks_first() -> None:
    logits = random_logits(2, 1, 20_000)
    logits[0, 12_345] = torch.nan
    assert rank(logits).token_ids[0, 0] == 12_345


def test_rows_are_ranked_together_as_each_by_itself() -> None:
    """Rows differ in how many logits are as great as the 256th maximum of a group."""
    logits = random_logits(4, 4, 20_001)
    logits[1] = 0.5
    logits[2, 300:] = -torch.inf
    logits[3, 12_345] = torch.nan
    ranked = rank(logits)
    for row in range(4):
        expected = logits[row].nan_to_num(torch.inf).sort(descending=True).values[:256]
        assert ranked.logits[row].nan_to_num(torch.inf).tolist() == expected.tolist()
        assert logits[row, ranked.token_ids[row]].allclose(ranked.logits[row], 0, 0, equal_nan=True)
        assert len(set(ranked.token_ids[row].tolist())) == 256
