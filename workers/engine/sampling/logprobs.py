"""Log probabilities of tokens and of their most probable alternatives, from unprocessed logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.protocol.records import TokenLogprobs
from workers.engine.core.sequence import ScheduledSequence
from workers.engine.core.sequence import Sequence as EngineSequence
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
    logprobs: list[TokenLogprobs] = []
    for chunk in iterate_chunks(requests, logits):
        of_rows, tokens, tops = zip(*chunk, strict=True)
        of_tokens = torch.tensor(tokens, device=logits.device)
        scores = score_tokens(take_rows(logits, list(of_rows)), of_tokens, max(tops))
        logprobs += to_logprobs(scores, tops)
    return logprobs


def score_tokens(logits: Tensor, token_ids: Tensor, num_tops: int) -> Tensor:
    """Return the log probability of a token in each row, its rank, and the most probable tokens
    with their log probabilities: float64 [num_rows, 2 + 2 * num_tops].

    `logits` are [num_rows, vocab_size], `token_ids` int64 [num_rows]. There are fewer alternatives
    if the vocabulary is smaller. On a GPU, the host does not wait.
    """
    scores, num_tops = logits.float(), min(num_tops, logits.shape[1])
    chosen = scores.gather(1, token_ids[:, None])
    candidates = scores
    if scores.device.type == "cpu":
        ranked = rank(scores)
        if bool((chosen >= ranked.logits[:, -1:]).all()):
            candidates = ranked.logits
        tops = ranked if num_tops <= NUM_RANKED else scores.topk(num_tops)
    else:
        tops = scores.topk(num_tops)
    ranks = (candidates > chosen).sum(1, keepdim=True) + 1
    # The chosen token comes first, then the most probable ones.
    values = torch.cat([chosen, tops[0][:, :num_tops]], 1) - scores.logsumexp(1, keepdim=True)
    values = values.nan_to_num(IMPOSSIBLE, neginf=IMPOSSIBLE)
    return torch.cat([part.double() for part in (values, ranks, tops[1][:, :num_tops])], 1)


def to_logprobs(scores: Tensor, num_tops: Sequence[int]) -> list[TokenLogprobs]:
    """Return the records of the scores of tokens, each with its number of alternatives."""
    width = scores.shape[1] // 2
    return [
        TokenLogprobs(
            round(values[0], DECIMALS),
            int(values[width]),
            [int(token_id) for token_id in values[width + 1 :][:num]],
            [round(value, DECIMALS) for value in values[1:width][:num]],
        )
        for values, num in zip(scores.tolist(), num_tops, strict=True)
    ]


def num_prompt_rows(s: ScheduledSequence) -> int:
    """Return the number of leading rows that predict a requested prompt token."""
    if s.sequence.prompt_logprobs is None:
        return 0
    stop = min(s.end, s.sequence.num_prompt_tokens - 1)
    return max(0, stop - s.start)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of logits that predict tokens of prompts."""

    logits: Tensor
    """[num_rows, vocab_size]"""
    sequences: list[EngineSequence]
    """The sequence of each row; its log probabilities are requested."""
    positions: list[int]
    """The position of the token that the row predicts."""

    @classmethod
    def of(cls, logits: Tensor, scheduled: Sequence[ScheduledSequence]) -> "PromptRows":
        """Return the rows of `logits` with their tokens, which are in the order of `scheduled`."""
        rows = [(s.sequence, s.start + 1 + i) for s in scheduled for i in range(num_prompt_rows(s))]
        return cls(logits, [sequence for sequence, _ in rows], [position for _, position in rows])

    def token_ids(self) -> list[int]:
        rows = zip(self.sequences, self.positions, strict=True)
        return [sequence.token_ids[position] for sequence, position in rows]

    def num_tops(self) -> list[int]:
        return [sequence.request.sampling.prompt_logprobs or 0 for sequence in self.sequences]

    def record(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Store the log probabilities of the rows in the sequences.

        Repeating it is harmless: a repeated run, or a prompt recomputed after a preemption, stores
        the same values.
        """
        for sequence, position, entry in zip(self.sequences, self.positions, logprobs, strict=True):
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs[position] = entry
