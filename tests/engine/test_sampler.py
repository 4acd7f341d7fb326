"""The sampler against transformers' processors, and against the definition of a distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shared.sampling import SamplingParams
from workers.engine import sampler
from workers.engine.sampler import keep_probable, penalize, sample, uniform
from workers.engine.sequence import EngineRequest, Sequence

VOCAB_SIZE = 300


def sequence_of(
    params: SamplingParams,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    seed: int = 7,
    choice: int = 0,
) -> Sequence:
    request = EngineRequest("r", list(prompt), [], params)
    return Sequence(request, choice, seed, [*prompt, *output], max_tokens=64)


def random_logits(seed: int, num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """What is left after the filters, as a distribution over the vocabulary."""
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    token_ids, kept = keep_probable(probs, params)
    ids = torch.arange(len(logits)) if token_ids is None else token_ids
    return torch.zeros(len(logits), dtype=torch.float64).index_add(0, ids, kept / kept.sum())


def transformers_filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(warpers(None, logits[None].double())[0], dim=-1)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.1, 2.0),
    top_k=st.sampled_from([0, 1, 5, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_leave_what_transformers_leaves(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
):
    logits = random_logits(seed)[0]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(
        filtered(logits, params), transformers_filtered(logits, params), atol=1e-9, rtol=1e-6
    )


def test_top_p_beyond_the_tokens_ranked_first_sorts_them_all(monkeypatch: pytest.MonkeyPatch):
    logits, params = random_logits(3)[0], SamplingParams(top_p=0.99)
    expected = filtered(logits, params)
    monkeypatch.setattr(sampler, "NUM_RANKED_FIRST", 4)
    torch.testing.assert_close(filtered(logits, params), expected)


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_answer():
    logits = random_logits(1)[0]
    sequence = sequence_of(SamplingParams(repetition_penalty=1.7), (4, 9, 9), (11, 4))
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([sequence.token_ids]), logits[None].clone())[0]
    torch.testing.assert_close(penalize(logits, sequence), expected)


def test_presence_and_frequency_count_the_answer_alone():
    logits = random_logits(2)[0]
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    penalized = penalize(logits, sequence_of(params, prompt=(5, 6), output=(6, 8, 8, 8)))
    difference = (logits - penalized).numpy()
    expected = np.zeros(VOCAB_SIZE)
    expected[6], expected[8] = 0.5 + 0.25, 0.5 + 3 * 0.25
    np.testing.assert_allclose(difference, expected, atol=1e-6)


def test_penalties_hold_for_greedy_choice_too():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 8], logits[0, 9] = 2.0, 1.5
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    assert sample(logits, [sequence_of(params)]) == [8]
    assert sample(logits, [sequence_of(params, output=(8,))]) == [9]


def test_a_token_is_the_same_whatever_the_batch():
    logits = random_logits(5, num_rows=6)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=20, top_p=0.9),
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(min_p=0.1, presence_penalty=1.0),
        SamplingParams(top_p=0.7),
    ]
    sequences = [sequence_of(kind, seed=i, choice=i % 3) for i, kind in enumerate(kinds)]
    together = sample(logits, sequences)
    alone = [sample(logits[i : i + 1], [s])[0] for i, s in enumerate(sequences)]
    backwards = sample(logits.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards


def test_seed_choice_and_position_each_move_the_point():
    points = {
        uniform(seed, choice, position)
        for seed in (0, 1, 2**63 - 1)
        for choice in range(8)
        for position in range(200)
    }
    assert len(points) == 3 * 8 * 200
    assert uniform(3, 1, 4) == uniform(3, 1, 4)


def test_points_are_uniform():
    points = np.sort([uniform(11, 0, position) for position in range(4000)])
    distance = np.abs(points - np.linspace(0, 1, len(points))).max()
    # Kolmogorov and Smirnov: below 1.63 / sqrt(n) in 99 of 100 draws.
    assert distance < 1.63 / len(points) ** 0.5


def test_tokens_are_drawn_in_proportion_to_their_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    params = SamplingParams(temperature=0.8, top_k=4)
    counts = np.zeros(5)
    num_draws = 4000
    for seed in range(num_draws):
        counts[sample(logits, [sequence_of(params, seed=seed)])[0]] += 1
    expected = filtered(logits[0], params).numpy()
    assert counts[3] == 0
    np.testing.assert_allclose(counts / num_draws, expected, atol=0.03)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.01])
def test_a_very_low_temperature_is_greedy(temperature: float):
    logits = random_logits(8)
    params = SamplingParams(temperature=temperature)
    assert sample(logits, [sequence_of(params)]) == logits.argmax(-1).tolist()


def test_no_rows_no_tokens():
    assert sample(torch.empty(0, VOCAB_SIZE), []) == []
