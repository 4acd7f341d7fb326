"""Log probabilities of tokens and of their most probable alternatives, from unprocessed logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.protocol.records import TokenLogprobs
from workers.engine.core.sequence import ScheduledSequence
from workers.engine.sampling.ranked import NUM_RANKED, rank
from workers.engine.sampling.row_chunks import iterate_chunks, take_rows

IMPOSSIBLE = -9999.0
"""Value for minus infinity, which JSON cannot express."""
DECIMALS = 6


def logprobs_of(
    logits: Tensor, rows: list[int], token_ids: list[int], num_tops: list[int]
) -> list[TokenLogprobs]:
    """Return the log probabilities of one token in each given row, and of `num_tops` alternatives.

    `logits` are [num_rows, vocab_size]; `rows`, `token_ids` and `num_tops` have equal lengths.
    """
    requests = list(zip(rows, token_ids, num_tops, strict=True))
    return [
        logprobs
        for chunk in iterate_chunks(requests, logits)
        for logprobs in _chunk_logprobs(logits, chunk)
    ]


def num_prompt_rows(s: ScheduledSequence) -> int:
    """Return the number of leading rows that predict a requested prompt token."""
    if s.sequence.prompt_logprobs is None:
        return 0
    stop = min(s.end, s.sequence.num_prompt_tokens - 1)
    return max(0, stop - s.start)


def record_prompt_logprobs(logits: Tensor, scheduled: Sequence[ScheduledSequence]) -> None:
    """Store prompt log probabilities in the sequences.

    Repeating it is harmless: a repeated run, or a prompt recomputed after a preemption, stores the
    same values.
    """
    for s in scheduled:
        num_rows, sequence = num_prompt_rows(s), s.sequence
        if num_rows == 0 or sequence.prompt_logprobs is None:
            continue
        positions = range(s.start + 1, s.start + 1 + num_rows)
        logprobs = logprobs_of(
            logits[:num_rows],
            list(range(num_rows)),
            [sequence.token_ids[position] for position in positions],
            [sequence.request.sampling.prompt_logprobs or 0] * num_rows,
        )
        sequence.prompt_logprobs.update(zip(positions, logprobs, strict=True))
        logits = logits[num_rows:]


def _chunk_logprobs(logits: Tensor, requests: list[tuple[int, int, int]]) -> list[TokenLogprobs]:
    rows, token_ids, num_tops = zip(*requests, strict=True)
    scores = take_rows(logits, list(rows)).float()
    index = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = scores.gather(1, index)
    ranked = rank(scores)
    are_ranked = bool((chosen >= ranked.logits[:, -1:]).all())
    ranks = ((ranked.logits if are_ranked else scores) > chosen).sum(1) + 1
    max_tops = min(max(num_tops), scores.shape[1])
    top_scores, top_token_ids = ranked if max_tops <= NUM_RANKED else scores.topk(max_tops)
    # The chosen token comes first, then the most probable ones.
    top_scores, top_token_ids = top_scores[:, :max_tops], top_token_ids[:, :max_tops]
    logprobs = torch.cat([chosen, top_scores], 1) - scores.logsumexp(1, keepdim=True)
    values = logprobs.nan_to_num(IMPOSSIBLE, neginf=IMPOSSIBLE).tolist()
    return [
        TokenLogprobs(
            round(chosen_logprob, DECIMALS),
            rank,
            top_ids[:num_top],
            [round(logprob, DECIMALS) for logprob in top[:num_top]],
        )
        for (chosen_logprob, *top), rank, top_ids, num_top in zip(
            values, ranks.tolist(), top_token_ids.tolist(), num_tops, strict=True
        )
    ]
