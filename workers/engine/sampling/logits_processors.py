"""What a request changes of its logits before a temperature comes in.

In vLLM's order: masks of a grammar, allowed_token_ids, bad_words, min_tokens, logit_bias, and then
the penalties: repetition, frequency, presence. So a penalty scales what the bias has made of a
logit, and nothing brings back what has been banned.

The cost is in proportion to the rows that ask, and within a row to the tokens concerned.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import Sequence


def is_adjusted(sequence: Sequence) -> bool:
    params = sequence.request.sampling
    return (
        _has_penalties(params)
        or sequence.token_mask is not None
        or bool(params.logit_bias)
        or bool(sequence.bad_words)
        or params.allowed_token_ids is not None
        or sequence.num_output_tokens < params.min_tokens
    )


def adjust(logits: Tensor, sequences: list[Sequence]) -> None:
    """In place, a row for each sequence: float32 [num_sequences, vocab_size]."""
    _apply_masks(logits, sequences)
    for row, sequence in zip(logits, sequences, strict=True):
        _keep_allowed(row, sequence.request.sampling)
    banned = [
        (row, token_id) for row, s in enumerate(sequences) for token_id in _banned_token_ids(s)
    ]
    if banned:
        logits[tuple(torch.tensor(banned, device=logits.device).T)] = -torch.inf
    _add_biases(logits, sequences)
    _penalize(logits, sequences)


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def _apply_masks(logits: Tensor, sequences: list[Sequence]) -> None:
    masks = [
        (row, words)
        for row, sequence in enumerate(sequences)
        if sequence.token_mask is not None and (words := sequence.token_mask.allowed()) is not None
    ]
    if not masks:
        return
    packed = torch.from_numpy(np.stack([words for _, words in masks])).to(logits.device)
    bits = packed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    rows = torch.tensor([row for row, _ in masks], device=logits.device)
    logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)


def _keep_allowed(row: Tensor, params: SamplingParams) -> None:
    if params.allowed_token_ids is not None:
        index = torch.tensor(params.allowed_token_ids, device=row.device)
        kept = row[index]
        row.fill_(-torch.inf)[index] = kept


def _banned_token_ids(sequence: Sequence) -> Iterator[int]:
    """The last token of each bad word of which the answer has just had the others, and all ends
    that come too early."""
    answer = sequence.token_ids[sequence.num_prompt_tokens :] if sequence.bad_words else []
    for *before, last in sequence.bad_words:
        if answer[max(len(answer) - len(before), 0) :] == before:
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
    """Repetition over prompt and answer, as in transformers; presence and frequency: the answer."""
    rows = [row for row, s in enumerate(sequences) if _has_penalties(s.request.sampling)]
    if not rows:
        return
    params = [sequence.request.sampling for sequence in sequences]
    penalties = torch.tensor(
        [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params],
        device=logits.device,
    )
    vocab_size, flat = logits.shape[1], logits.view(-1)

    def places(all_tokens: bool) -> Tensor:
        starts = [0 if all_tokens else sequences[row].num_prompt_tokens for row in rows]
        return torch.from_numpy(
            np.concatenate(
                [
                    np.asarray(sequences[row].token_ids[start:], dtype=np.int64) + row * vocab_size
                    for row, start in zip(rows, starts, strict=True)
                ]
            )
        ).to(logits.device)

    seen: Tensor = torch.unique(places(all_tokens=True))
    scores, factor = flat[seen], penalties[seen // vocab_size, 0]
    flat[seen] = torch.where(scores < 0, scores * factor, scores / factor)
    answered, counts = torch.unique(places(all_tokens=False), return_counts=True)
    _, frequency, presence = penalties[answered // vocab_size].T
    flat[answered] -= frequency * counts + presence
