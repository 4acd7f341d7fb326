"""Logits processors equal transformers' processors and published formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from shared.protocol.sampling import SamplingParams
from tests.engine.sampling.test_sampler import VOCAB_SIZE, random_logits, sequence_of
from workers.engine.core.sequence import Sequence
from workers.engine.sampling.logits_processors import needs_processing, process_logits
from workers.engine.sampling.sampler import sample

token_lists = st.lists(st.integers(0, 12), max_size=8)
logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=13, max_size=13).map(torch.tensor)


def adjusted(logits: Tensor, *sequences: Sequence) -> Tensor:
    """[vocab_size] for one sequence, else [num_sequences, vocab_size]."""
    rows = process_logits(logits.expand(len(sequences), -1), list(sequences))
    return rows[0] if len(sequences) == 1 else rows


def processed(processor: LogitsProcessor, logits: Tensor, sequence: Sequence) -> Tensor:
    scores: Tensor = processor(torch.tensor([sequence.token_ids]), logits[None].clone())
    return scores[0]


@given(logit_rows, token_lists.filter(bool), token_lists, st.floats(0.5, 2.0))
def test_repetition_penalty_equals_transformers_over_prompt_and_answer(
    logits: Tensor, prompt: list[int], output: list[int], penalty: float
) -> None:
    sequence = sequence_of(SamplingParams(repetition_penalty=penalty), prompt, output)
    expected = processed(RepetitionPenaltyLogitsProcessor(penalty), logits, sequence)
    torch.testing.assert_close(adjusted(logits, sequence), expected)


@given(logit_rows, token_lists, token_lists, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties_count_output_tokens_only(
    logits: Tensor, prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, as OpenAI's reference has it."""
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    counts = torch.tensor([output.count(token_id) for token_id in range(13)])
    expected = logits - counts * frequency - (counts > 0) * presence
    torch.testing.assert_close(
        adjusted(logits, sequence_of(params, prompt, output)), expected, atol=1e-5, rtol=1e-5
    )


@given(
    logit_rows,
    token_lists,
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_bad_words_are_banned_as_by_transformers(
    logits: Tensor, output: list[int], words: list[list[int]]
) -> None:
    # The prompt's token is in no word: transformers looks for their beginnings there too.
    sequence = sequence_of(SamplingParams(bad_words=["x"]), (12,), output)
    sequence.bad_words = tuple(map(tuple, words))
    expected = processed(NoBadWordsLogitsProcessor(words), logits, sequence)
    torch.testing.assert_close(adjusted(logits, sequence), expected)


@given(logit_rows, token_lists, st.integers(0, 8), st.lists(st.integers(0, 12), max_size=3))
def test_min_tokens_is_transformers_min_new_tokens(
    logits: Tensor, output: list[int], min_tokens: int, ends: list[int]
) -> None:
    sequence = sequence_of(SamplingParams(min_tokens=min_tokens), (1, 2), output)
    sequence.end_token_ids = tuple(ends)
    processor = MinNewTokensLengthLogitsProcessor(2, min_tokens, ends or [13])
    torch.testing.assert_close(adjusted(logits, sequence), processed(processor, logits, sequence))
    assert needs_processing(sequence) == (len(output) < min_tokens)


@given(logit_rows, st.dictionaries(st.integers(0, 12), st.floats(-100, 100, width=32), min_size=1))
def test_logit_bias_is_transformers_sequence_bias_of_single_tokens(
    logits: Tensor, bias: dict[int, float]
) -> None:
    sequence = sequence_of(SamplingParams(logit_bias=bias))
    # The annotation of the parameter allows only lists.
    sequences: Any = {(t,): b for t, b in bias.items()}
    processor = SequenceBiasLogitsProcessor(sequences)
    torch.testing.assert_close(adjusted(logits, sequence), processed(processor, logits, sequence))


@given(logit_rows, st.lists(st.integers(0, 12), min_size=1))
def test_all_but_the_allowed_tokens_are_suppressed(logits: Tensor, allowed: list[int]) -> None:
    sequence = sequence_of(SamplingParams(allowed_token_ids=allowed))
    processor = SuppressTokensLogitsProcessor([t for t in range(13) if t not in allowed])
    torch.testing.assert_close(adjusted(logits, sequence), processed(processor, logits, sequence))


def test_lists_of_allowed_tokens_hold_each_for_its_rows() -> None:
    token_ids, other = [0, 7, VOCAB_SIZE - 1], [5]
    lists = [token_ids, None, other, token_ids]
    sequences = [sequence_of(SamplingParams(allowed_token_ids=allowed)) for allowed in lists]
    logits = random_logits(3)[0]
    for _ in range(2):
        for row, allowed in zip(adjusted(logits, *sequences), lists, strict=True):
            ids = list(range(VOCAB_SIZE)) if allowed is None else allowed
            assert row.isfinite().nonzero()[:, 0].tolist() == ids
            torch.testing.assert_close(row[ids], logits[ids])


class Mask:
    """Made by hand, of the ids that may follow."""

    def __init__(self, allowed: list[int] | None) -> None:
        self._allowed = allowed

    def allowed(self) -> NDArray[np.int32] | None:
        if self._allowed is None:
            return None
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=np.uint8)
        bits[self._allowed] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token_id: int) -> None:
        raise AssertionError("nothing is sampled here that anybody keeps")


def test_masks_hold_each_for_its_row() -> None:
    masks = [[0, 31, 32, 299], None, [5], list(range(VOCAB_SIZE))]
    sequences = [sequence_of(SamplingParams()) for _ in masks]
    for sequence, allowed in zip(sequences, masks, strict=True):
        sequence.token_mask = Mask(allowed)
    logits = random_logits(3)[0]
    for row, allowed in zip(adjusted(logits, *sequences), masks, strict=True):
        ids = list(range(VOCAB_SIZE)) if allowed is None else allowed
        assert row.isfinite().nonzero()[:, 0].tolist() == ids
        torch.testing.assert_close(row[ids], logits[ids])
    assert sample(logits[None], sequences[2:3]) == [5]


def test_penalties_apply_to_biased_logits_and_unban_no_token() -> None:
    params = SamplingParams(
        logit_bias={1: 4.0, 2: 100.0}, repetition_penalty=2.0, bad_words=["x"], min_p=1.0
    )
    sequence = sequence_of(params, prompt=(1, 2))
    sequence.bad_words = ((2,),)
    row = adjusted(torch.full((13,), 2.0), sequence)
    assert row[[0, 1, 2]].tolist() == [2.0, (2.0 + 4.0) / 2.0, -torch.inf]


@pytest.mark.parametrize(
    "change",
    [
        {"frequency_penalty": 1.0},
        {"presence_penalty": -1.0},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"min_tokens": 1},
    ],
)
def test_rows_without_parameters_are_not_changed(change: dict[str, Any]) -> None:
    logits = random_logits(2)[0]
    plain, asking = sequence_of(SamplingParams()), sequence_of(SamplingParams(**change))
    asking.end_token_ids = plain.end_token_ids = (9,)
    assert not needs_processing(plain)
    assert needs_processing(asking)
    rows = adjusted(logits, plain, asking, plain)
    assert torch.equal(rows[0], logits)
    assert torch.equal(rows[2], logits)
    assert torch.equal(rows[1], adjusted(logits, asking))


def test_penalties_apply_to_greedy_sampling_too() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 8], logits[0, 9] = 2.0, 1.5
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    assert sample(logits, [sequence_of(params)]) == [8]
    assert sample(logits, [sequence_of(params, output=(8,))]) == [9]
