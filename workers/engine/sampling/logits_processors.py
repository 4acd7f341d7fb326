"""Logits processors: per-request changes to the logits before the temperature.

They run in vLLM's order: grammar mask, allowed_token_ids, bad_words, min_tokens, logit_bias, then
the repetition, frequency and presence penalties. Penalties therefore apply to biased logits, and no
later processor can bring back a banned token.

The cost is proportional to the rows that need processing and, within a row, to the tokens affected.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import Sequence

# A list of allowed tokens can be as long as the vocabulary.
MAX_CACHED_LISTS = 16


def needs_processing(sequence: Sequence) -> bool:
    """Return True if a processor applies to the next token of the sequence."""
    params = sequence.request.sampling
    return (
        _has_penalties(params)
        or sequence.token_mask is not None
        or bool(params.logit_bias)
        or bool(sequence.bad_words)
        or params.allowed_token_ids is not None
        or sequence.num_output_tokens < params.min_tokens
    )


def process_logits(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Return changed `logits` [num_sequences, vocab_size] float32, one row per sequence."""
    logits = _apply_masks(logits, sequences)
    _restrict_to_allowed(logits, sequences)
    banned = [
        (row, token_id) for row, s in enumerate(sequences) for token_id in _banned_token_ids(s)
    ]
    if banned:
        logits[tuple(torch.tensor(banned, device=logits.device).T)] = -torch.inf
    _add_biases(logits, sequences)
    _penalize(logits, sequences)
    return logits


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def _apply_masks(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Return a copy of the logits, which are minus infinity where a grammar allows no token."""
    masks = [
        (row, words)
        for row, sequence in enumerate(sequences)
        if sequence.token_mask is not None and (words := sequence.token_mask.allowed()) is not None
    ]
    if not masks:
        return logits.clone()
    limits = _limits_of(np.stack([words for _, words in masks]), logits.device)
    limits = limits.view(len(masks), -1)[:, : logits.shape[1]]
    if len(masks) == len(logits):
        return torch.minimum(logits, limits)
    rows = [row for row, _ in masks]
    masked = logits.clone()
    masked[rows] = torch.minimum(logits[rows], limits)
    return masked


def _limits_of(packed: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return the greatest logit that each bit allows, as eight for each byte of `packed`."""
    each_byte, table = packed.view(np.uint8).ravel(), _limits_by_byte(device)
    if device.type == "cpu":
        # NumPy takes half of PyTorch's time, if it need not check the indexes.
        return torch.from_numpy(np.take(table.numpy(), each_byte, axis=0, mode="clip"))
    return table.index_select(0, torch.from_numpy(each_byte).to(device).int())


@lru_cache
def _limits_by_byte(device: torch.device) -> Tensor:
    """Return the greatest logit that each bit of a byte allows, [256, 8]: infinity or minus it."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return (bits - 0.5) * torch.inf


def _restrict_to_allowed(logits: Tensor, sequences: list[Sequence]) -> None:
    lists: dict[int, list[int]] = {}
    rows: dict[int, list[int]] = defaultdict(list)
    for row, sequence in enumerate(sequences):
        # The speeches of a talker all have the same list.
        if (token_ids := sequence.request.sampling.allowed_token_ids) is not None:
            lists[id(token_ids)] = token_ids
            rows[id(token_ids)].append(row)
    for key, token_ids in lists.items():
        forbidden = _forbidden(tuple(token_ids), logits.shape[1], logits.device)
        if len(rows[key]) == len(sequences):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            logits[rows[key]] = logits[rows[key]].masked_fill_(forbidden, -torch.inf)


@lru_cache(MAX_CACHED_LISTS)
def _forbidden(allowed: tuple[int, ...], vocab_size: int, device: torch.device) -> Tensor:
    """Return a mask of the tokens that are not `allowed`, [vocab_size].

    It is cached, because a talker needs the same mask at each step.
    """
    mask = torch.ones(vocab_size, dtype=torch.bool, device=device)
    mask[torch.tensor(allowed, device=device)] = False
    return mask


def _banned_token_ids(sequence: Sequence) -> Iterator[int]:
    """Yield the tokens that would complete a bad word, and end tokens before `min_tokens`."""
    output = sequence.token_ids[sequence.num_prompt_tokens :] if sequence.bad_words else []
    for *before, last in sequence.bad_words:
        if output[max(len(output) - len(before), 0) :] == before:
            yield last
    if sequence.num_output_tokens < sequence.request.sampling.min_tokens:
        yield from sequence.end_token_ids


def _add_biases(logits: Tensor, sequences: list[Sequence]) -> None:
    biases = [
        (row, token_id, bias)
        for row, sequence in enumerate(sequences)
        for token_id, bias in sequence.request.sampling.logit_bias.items()
    ]
    if biases:
        rows, token_ids, values = zip(*biases, strict=True)
        index = torch.tensor([rows, token_ids], device=logits.device)
        logits[index[0], index[1]] += torch.tensor(values, device=logits.device)


def _penalize(logits: Tensor, sequences: list[Sequence]) -> None:
    """Apply the penalties as transformers and the OpenAI API define them.

    The repetition penalty counts prompt and output tokens; the other two count output tokens.
    """
    rows = [row for row, s in enumerate(sequences) if _has_penalties(s.request.sampling)]
    if not rows:
        return
    params = [sequence.request.sampling for sequence in sequences]
    penalties = torch.tensor(
        [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params],
        device=logits.device,
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
        ).to(logits.device)

    # A repeated token is written several times, always with the same score.
    tokens = flat_indexes(all_tokens=True)
    scores, factor = flat[tokens], penalties[tokens // vocab_size, 0]
    flat[tokens] = torch.where(scores < 0, scores * factor, scores / factor)
    generated, counts = torch.unique(flat_indexes(all_tokens=False), return_counts=True)
    _, frequency, presence = penalties[generated // vocab_size].T
    flat[generated] -= frequency * counts + presence
