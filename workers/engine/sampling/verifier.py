"""Verification of draft tokens in speculative decoding, exact for any sampling parameters.

A token is sampled in the usual way at each position, as if the drafts before it were the output.
While the sampled token equals the draft, the next row counts too. Every row that counts is thus
computed from tokens of the output alone. A sampled token depends on its logits and on (seed,
choice, position), and not on a random state that drafts could advance. The output is therefore the
same as without drafts, and a resumed request continues identically wherever its log ends. Rejection
sampling (Leviathan et al., 2023) would preserve only the distribution.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor

from shared.errors import InvalidRequest
from shared.protocol.records import TokenLogprobs
from workers.engine.core.sequence import SampledToken, ScheduledSequence, Sequence
from workers.engine.sampling.logprobs import logprobs_of
from workers.engine.sampling.sampler import Drawn, check_finite, draw_tokens


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone.

    Operations on logits take about 10 µs. With several threads, each operation ends with a wait for
    all of them, which takes far longer when another process uses a core. Waiting threads also spin
    on cores that the model's kernels use next.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class DrawnBatch:
    """Tokens that were drawn for a batch."""

    def __init__(self, logits: Tensor, scheduled: list[ScheduledSequence], drawn: Drawn) -> None:
        # Otherwise the memory is free for the next batch.
        kinds = {s.sequence.request.sampling.logprobs for s in scheduled}
        self._logits = None if kinds == {None} else logits
        self._is_plain = self._logits is None and len(logits) == len(scheduled)
        """Whether there are neither drafts nor log probabilities."""
        self._scheduled = scheduled
        self._drawn = drawn

    @property
    def token_ids(self) -> Tensor:
        """Tokens on the device, int64: one for each sequence, and one more for each draft."""
        return self._drawn.token_ids

    @one_thread()
    def result(self) -> list[list[SampledToken]]:
        """Wait for the tokens; return the accepted drafts and the token after them, by sequence.

        Raises ArithmeticError for the row of a rejected draft too: logits that are not finite mean
        such keys or values, which stay in the cache, masked, until overwritten.
        """
        token_ids = self._drawn.result()
        if self._is_plain:
            return [[token] for token in map(SampledToken, token_ids)]
        accepted_rows, first_row = [], 0
        for s in self._scheduled:
            num_accepted = _num_accepted(s, token_ids[first_row:]) if s.draft_token_ids else 0
            accepted_rows.append(range(first_row, first_row + 1 + num_accepted))
            first_row += 1 + len(s.draft_token_ids)
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logits is not None:
            logprobs = _requested_logprobs(self._logits, self._scheduled, accepted_rows, token_ids)
        return [
            [SampledToken(token_ids[row], logprobs.get(row)) for row in rows]
            for rows in accepted_rows
        ]


@one_thread()
def draw_batch(logits: Tensor, scheduled: list[ScheduledSequence]) -> DrawnBatch:
    """Draw the tokens of sequences and of their drafts.

    `logits` [num_rows, vocab_size] have one row per sequence and one more per draft. Raises the
    errors of `draw_tokens`.
    """
    if len(logits) == len(scheduled):
        return DrawnBatch(logits, scheduled, draw_tokens(logits, [s.sequence for s in scheduled]))
    positions = [(s, position) for s in scheduled for position in range(1 + len(s.draft_token_ids))]
    try:
        drawn = draw_tokens(logits, [_with_drafts(s, position) for s, position in positions])
    except InvalidRequest:
        # The row after a rejected draft may allow no token, which is not an error of the request.
        check_finite(logits.amax(-1))
        certain = [row for row, (_, position) in enumerate(positions) if position == 0]
        undrafted = [ScheduledSequence(s.sequence, s.num_new_tokens, s.samples) for s in scheduled]
        return draw_batch(logits[certain], undrafted)
    return DrawnBatch(logits, scheduled, drawn)


def _with_drafts(s: ScheduledSequence, num_drafts: int) -> Sequence:
    """Return the sequence with its first `num_drafts` drafts appended to the output."""
    if num_drafts == 0:
        return s.sequence
    sequence = copy(s.sequence)
    sequence.token_ids = [*s.sequence.token_ids, *s.draft_token_ids[:num_drafts]]
    return sequence


def _num_accepted(s: ScheduledSequence, token_ids: list[int]) -> int:
    num_accepted = 0
    for draft, token_id in zip(s.draft_token_ids, token_ids, strict=False):
        if draft != token_id:
            break
        num_accepted += 1
    return num_accepted


def _requested_logprobs(
    logits: Tensor,
    scheduled: list[ScheduledSequence],
    accepted_rows: list[range],
    token_ids: list[int],
) -> dict[int, TokenLogprobs]:
    """Return log probabilities by row, for the requests that ask for them."""
    requested = [
        (row, k)
        for s, of_sequence in zip(scheduled, accepted_rows, strict=True)
        if (k := s.sequence.request.sampling.logprobs) is not None
        for row in of_sequence
    ]
    rows, num_tops = map(list, zip(*requested, strict=True))
    logprobs = logprobs_of(logits, rows, [token_ids[row] for row in rows], num_tops)
    return dict(zip(rows, logprobs, strict=True))
