"""Logits processors: per-request changes to the logits before the temperature.

They run in vLLM's order: grammar mask, allowed_token_ids, bad_words, min_tokens, logit_bias, then
the repetition, frequency and presence penalties. Penalties therefore apply to biased logits, and no
later processor can bring back a banned token.

The cost is proportional to the rows that need processing and, within a row, to the tokens affected.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import Sequence
from workers.engine.sampling.token_rules import pack_tokens


def needs_processing(sequence: Sequence) -> bool:
    """Return True if a processor applies to the next token of the sequence."""
    params = sequence.request.sampling
    return (
        has_penalties(params)
        or sequence.token_mask is not None
        or bool(params.logit_bias)
        or bool(sequence.bad_words)
        or params.allowed_token_ids is not None
        or sequence.num_output_tokens < params.min_tokens
    )


def process_logits(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Return changed `logits` [num_sequences, vocab_size] float32 on a CPU, one row for each
    sequence."""
    logits = _apply_masks(logits, sequences)
    for row, sequence in enumerate(sequences):
        if adjustments := adjustments_of(sequence):
            token_ids, values = map(list, zip(*adjustments.items(), strict=True))
            logits[row, token_ids] += torch.tensor(values)
    _penalize(logits, sequences)
    return logits


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def allowed_bits(sequence: Sequence, vocab_size: int) -> NDArray[np.int32] | None:
    """Return a bit for each token that the grammar and the request allow next; None allows all."""
    bits = None if sequence.token_mask is None else sequence.token_mask.allowed()
    if (token_ids := sequence.request.sampling.allowed_token_ids) is not None:
        # The speeches of a talker all have the same list, at each step.
        listed = pack_tokens(tuple(token_ids), vocab_size)
        bits = listed if bits is None else bits[: len(listed)] & listed
    return bits


def adjustments_of(sequence: Sequence) -> dict[int, float]:
    """Return the biases of tokens: minus infinity for banned tokens.

    Banned are tokens that would complete a bad word, and end tokens before `min_tokens`.
    """
    biases: dict[int, float] = {**sequence.request.sampling.logit_bias}
    biases |= dict.fromkeys(_banned_token_ids(sequence), -math.inf)
    return biases


def _apply_masks(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Return a copy of the logits, which are minus infinity for tokens that are not allowed."""
    masks = [
        (row, bits)
        for row, sequence in enumerate(sequences)
        if (bits := allowed_bits(sequence, logits.shape[1])) is not None
    ]
    if not masks:
        return logits.clone()
    each_byte = np.stack([bits for _, bits in masks]).view(np.uint8).ravel()
    # NumPy takes half of PyTorch's time, if it need not check the indexes.
    limits = torch.from_numpy(np.take(_limits_by_byte(), each_byte, axis=0, mode="clip"))
    limits = limits.view(len(masks), -1)[:, : logits.shape[1]]
    if len(masks) == len(logits):
        return torch.minimum(logits, limits)
    rows = [row for row, _ in masks]
    masked = logits.clone()
    masked[rows] = torch.minimum(logits[rows], limits)
    return masked


@lru_cache(1)
def _limits_by_byte() -> NDArray[np.float32]:
    """Return the greatest logit that each bit of a byte allows, [256, 8]: infinity or minus it."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return np.where(bits, np.float32(np.inf), np.float32(-np.inf))


def _banned_token_ids(sequence: Sequence) -> Iterator[int]:
    """Yield the tokens that would complete a bad word, and end tokens before `min_tokens`."""
    output = sequence.token_ids[sequence.num_prompt_tokens :] if sequence.bad_words else []
    for *before, last in sequence.bad_words:
        if output[max(len(output) - len(before), 0) :] == before:
            yield last
    if sequence.num_output_tokens < sequence.request.sampling.min_tokens:
        yield from sequence.end_token_ids


def _penalize(logits: Tensor, sequences: list[Sequence]) -> None:
    """Apply the penalties as transformers and the OpenAI API define them.

    The repetition penalty counts prompt and output tokens; the other two count output tokens.
    """
    rows = [row for row, s in enumerate(sequences) if has_penalties(s.request.sampling)]
    if not rows:
        return
    params = [sequence.request.sampling for sequence in sequences]
    penalties = torch.tensor(
        [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
    )
    vocab_size, flat = logits.shape[1], logits.view(-1)

    def flat_indexes(all_tokens: bool) -> Tensor:
        starts = [0 if all_tokens else sequences[row].num_prompt_tokens for row in rows]
        return torch.from_numpy(
            np.concatenate(
                [
                    np.asarray(sequences[row].token_ids[start:], dtype=np.int64) + row * vocab_size
                    for row, start in zip(rows, starts, strict=True)
                ]
            )
        )

    # A repeated token is written several times, always with the same score.
    tokens = flat_indexes(all_tokens=True)
    scores, factor = flat[tokens], penalties[tokens // vocab_size, 0]
    flat[tokens] = torch.where(scores < 0, scores * factor, scores / factor)
    generated, counts = torch.unique(flat_indexes(all_tokens=False), return_counts=True)
    _, frequency, presence = penalties[generated // vocab_size].T
    flat[generated] -= frequency * counts + presence
