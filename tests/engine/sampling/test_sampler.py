"""Which token is taken: greedy, by filters against transformers', and by chance."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shared.errors import InvalidRequest
from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import EngineRequest, Sequence
from workers.engine.sampling import row_chunks
from workers.engine.sampling.sampler import NUM_DRAWN, point_of, sample, uniform
from workers.engine.sampling.truncation import (
    UNITS,
    Filters,
    chunk_size,
    draw,
    truncate,
    unnormalized_probs,
)

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 300


def sequence_of(
    params: SamplingParams,
    prompt: Seq[int] = (1, 2, 3),
    output: Seq[int] = (),
    seed: int = 7,
    choice: int = 0,
) -> Sequence:
    request = EngineRequest("r", list(prompt), [], params)
    return Sequence(request, choice, seed, [*prompt, *output], max_tokens=64)


def random_logits(seed: int, num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def column(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Distribution over the vocabulary after the filters."""
    filters = filters_of(params, len(logits))
    weights = unnormalized_probs(logits[None], logits.max()[None, None], filters.temperature)
    left = truncate(weights, filters)[0].double()
    return left / left.sum()


def filters_of(params: SamplingParams, vocab_size: int) -> Filters:
    return Filters(
        column(params.temperature).float(),
        column(params.min_p),
        column(min(params.top_k or vocab_size, vocab_size)).long(),
        column(params.top_p),
    )


def transformers_filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    no_ids: Any = None  # no filter reads the tokens
    return torch.softmax(warpers(no_ids, logits[None].double())[0], dim=-1)


# -- filters --------------------------------------------------------------------------------------


@given(
    # Far enough apart for float32, because transformers receives float64.
    logits=st.lists(st.integers(-4000, 4000), min_size=1, max_size=60, unique=True),
    temperature=st.floats(0.1, 2.0),
    top_k=st.sampled_from([0, 1, 5, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_leave_what_transformers_leaves(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.tensor(logits) / 256
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(
        filtered(row, params), transformers_filtered(row, params), atol=1e-9, rtol=2e-5
    )


@pytest.mark.parametrize(("target", "num_left"), [(-0.5, 1), (0.0, 1), (0.5, 2), (1.0, 2)])
def test_top_p_keeps_a_token_while_more_probable_ones_lack_less_than_a_unit(
    target: float, num_left: int
) -> None:
    """The first of two tokens has 2^40 units, which is all of the target but for a part of one."""
    weights = torch.tensor([[1.0, 0.5]])
    top_p = column((UNITS + target) / (1.5 * UNITS))
    temperature, min_p, top_k, _ = filters_of(SamplingParams(), 2)
    filters = Filters(temperature, min_p, top_k, top_p)
    left = truncate(weights, filters)
    assert int((left > 0).sum()) == num_left


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (40, 1.0), (5000, 0.8), (0, 0.01)])
def test_a_large_vocabulary_is_filtered_as_by_transformers(
    spread: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(4, vocab_size=32_000)[0] * spread
    params = SamplingParams(top_k=top_k, top_p=top_p)
    torch.testing.assert_close(
        filtered(logits, params), transformers_filtered(logits, params), atol=1e-9, rtol=2e-5
    )


@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    params=st.builds(
        SamplingParams,
        top_k=st.integers(0, 12),
        top_p=st.sampled_from([1.0, 0.9, 0.5, 0.25]),
        min_p=st.sampled_from([0.0, 0.1, 0.5]),
    ),
)
def test_tied_tokens_are_kept_or_removed_together(
    logits: list[int], params: SamplingParams
) -> None:
    remains = filtered(torch.tensor(logits).float(), params) > 0
    least = min(logit for logit, stays in zip(logits, remains, strict=True) if stays)
    assert remains.tolist() == [logit >= least for logit in logits]


def test_tokens_without_weight_are_not_drawn() -> None:
    weights = torch.zeros(2, 1024)
    weights[0, 700], weights[1, [5, 900]] = 1.0, torch.tensor([1.0, 0.5])
    for point in (0.0, 0.5, 1 - 2.0**-52):
        tokens = draw(weights.clone(), torch.tensor([point, point], dtype=torch.float64)).tolist()
        assert tokens == [700, 5 if point < 0.6 else 900]


# -- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 199, 768, 1024])
def test_the_first_of_equal_maxima_is_chosen(dtype: torch.dtype, vocab_size: int) -> None:
    logits = random_logits(6, 5, vocab_size).to(dtype)
    logits[1] = 0
    sequences = [sequence_of(SamplingParams(temperature=0))] * 5
    expected = [row.float().numpy().argmax() for row in logits]
    assert sample(logits, sequences) == expected


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.001])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(8)
    params = SamplingParams(temperature=temperature)
    assert sample(logits, [sequence_of(params)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=0, allowed_token_ids=[5]),
    ],
)
def test_logits_that_are_not_finite_raise(spoilt: float, params: SamplingParams) -> None:
    logits = random_logits(9, 3)
    logits[1, 17] = spoilt
    with pytest.raises(ArithmeticError):
        sample(logits, [sequence_of(params)] * 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_bans_every_token_gets_invalid_request(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=2, allowed_token_ids=[5, 6])
    sequence = sequence_of(params)
    sequence.end_token_ids = (5, 6)
    with pytest.raises(InvalidRequest) as raised:
        sample(random_logits(9), [sequence])
    assert raised.value.field == "sampling_params"


# -- chance ---------------------------------------------------------------------------------------

MIXED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.sampled_from([{}, {5: 100.0}, {7: -1.5, 299: 2.5}]),
    allowed_token_ids=st.none() | st.just([1, 5, 7, 200]),
    min_tokens=st.integers(0, 3),
)


@given(
    kinds=st.lists(MIXED, min_size=2, max_size=8),
    vocab_size=st.sampled_from([300, 512, 768]),
    piece=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_a_token_does_not_depend_on_its_batch(
    kinds: list[SamplingParams],
    vocab_size: int,
    piece: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    logits = random_logits(5, len(kinds), vocab_size).to(dtype)
    before = logits.clone()
    sequences = [
        sequence_of(kind, output=range(10, 10 + i), seed=i, choice=i % 3)
        for i, kind in enumerate(kinds)
    ]
    for sequence in sequences:
        sequence.end_token_ids = (0, 5)
    alone = [sample(logits[i : i + 1], [s])[0] for i, s in enumerate(sequences)]
    order = data.draw(st.permutations(range(len(kinds))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_chunks, "CPU_CHUNK_LOGITS", piece * vocab_size)
        together = sample(logits[order], [sequences[i] for i in order])
    assert together == [alone[i] for i in order]
    assert torch.equal(logits, before), "they are not ours to change"


def test_seed_choice_and_position_each_move_the_point() -> None:
    points = {
        uniform(seed, choice, position)
        for seed in (0, 1, 2**63 - 1)
        for choice in range(8)
        for position in range(200)
    }
    assert len(points) == 3 * 8 * 200
    assert uniform(3, 1, 4) == uniform(3, 1, 4)


def test_points_drawn_at_once_are_those_of_single_positions() -> None:
    """Also after a preemption, a resume, and where drafts have skipped some."""
    sequence = sequence_of(SamplingParams(), seed=7, choice=2)
    for num_tokens in (0, 1, 5, NUM_DRAWN - 1, NUM_DRAWN, NUM_DRAWN + 90, 3):
        del sequence.token_ids[sequence.num_prompt_tokens :]
        sequence.token_ids += [1] * num_tokens
        bits = int(np.random.Philox(key=[7, 2], counter=num_tokens).random_raw())
        assert point_of(sequence) == (bits >> 12) * 2.0**-52 == uniform(7, 2, num_tokens)


def test_points_are_uniform() -> None:
    points = np.sort([uniform(11, 0, position) for position in range(4000)])
    distance = np.abs(points - np.linspace(0, 1, len(points))).max()
    # Kolmogorov and Smirnov: below 1.63 / sqrt(n) in 99 of 100 draws.
    assert distance < 1.63 / len(points) ** 0.5


# Degrees of freedom, and the value that chi-square exceeds in one of 1,000 draws.
CRITICAL = {2: 13.82, 3: 16.27, 4: 18.47, 19: 43.82, 31: 61.10}
NUM_DRAWS = 4000


@pytest.mark.parametrize(
    ("params", "vocab_size"),
    [
        (SamplingParams(), 32),
        (SamplingParams(temperature=0.5, top_k=5), 32),
        (SamplingParams(top_p=0.8), 24),
        (SamplingParams(min_p=0.2), 64),
        (SamplingParams(temperature=2.0, top_k=20), 1000),
    ],
)
@pytest.mark.parametrize("variable", ["seed", "position"])
def test_tokens_are_drawn_in_proportion_to_their_probabilities(
    params: SamplingParams, vocab_size: int, variable: str
) -> None:
    """Over counters, so that it comes out the same each time it is run."""
    row = random_logits(12, 1, vocab_size) / 3
    expected = NUM_DRAWS * transformers_filtered(row[0], params).numpy()
    sequences = [
        sequence_of(params, seed=i)
        if variable == "seed"
        else sequence_of(params, output=[0] * (i % 200), choice=i // 200)
        for i in range(NUM_DRAWS)
    ]
    counts = np.bincount(sample(row.expand(NUM_DRAWS, -1), sequences), minlength=vocab_size)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    counts, expected = counts[possible], expected[possible]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = min(k for k in CRITICAL if k >= len(counts) - 1)
    assert len(counts) > 2
    assert chi_square < CRITICAL[degrees]


def test_chunks_divide_the_vocabulary() -> None:
    assert [chunk_size(size) for size in (151_936, 49_152, 50_257, 199)] == [128, 512, 1, 1]
