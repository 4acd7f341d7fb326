"""Verification of draft tokens in speculative decoding, exact for any sampling parameters.

A token is sampled in the usual way at each position, as if the drafts before it were the output.
While the sampled token equals the draft, the next row counts too. Every row that counts is thus
computed from tokens of the output alone. A sampled token depends on its logits and on (seed,
choice, position), and not on a random state that drafts could advance. The output is therefore the
same as without drafts, and a resumed request continues identically wherever its log ends. Rejection
sampling (Leviathan et al., 2023) would preserve only the distribution.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from shared.errors import InvalidRequest
from shared.protocol.records import TokenLogprobs
from workers.engine.core.sequence import SampledToken, ScheduledSequence, Sequence
from workers.engine.sampling.logprobs import PromptRows, logprobs_of
from workers.engine.sampling.sampler import check_finite, draw_tokens


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


class DrawnRows(Protocol):
    """The next token of each row. Until `result`, the tokens may only be known on the device."""

    @property
    def token_ids(self) -> Tensor:
        """Tokens on the device, int64 [num_rows]."""

    def result(self) -> list[int]:
        """Wait for the tokens. Raises ArithmeticError if logits are not finite."""

    def check(self, rows: Iterable[int]) -> None:
        """Raise InvalidRequest if one of these rows has no token to choose."""

    def logprobs_of(self, rows: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
        """Return the log probabilities of the tokens of rows, and of alternatives."""


class DrawnBatch:
    """Tokens that were drawn for a batch."""

    def __init__(
        self, scheduled: list[ScheduledSequence], rows: DrawnRows, *, are_scored: bool
    ) -> None:
        """There is one row for each sequence, and one more for each draft. `are_scored` is whether
        any request asks for log probabilities of its tokens."""
        self._scheduled = scheduled
        self._rows = rows
        self._are_scored = are_scored

    @property
    def token_ids(self) -> Tensor:
        """Tokens on the device, int64: one for each sequence, and one more for each draft."""
        return self._rows.token_ids

    @one_thread()
    def result(self) -> list[list[SampledToken]]:
        """Wait for the tokens; return the accepted drafts and the token after them, by sequence.

        Raises ArithmeticError for the row of a rejected draft too: logits that are not finite mean
        such keys or values, which stay in the cache, masked, until overwritten. Raises
        InvalidRequest if a request has banned every token.
        """
        token_ids = self._rows.result()
        if not self._are_scored and len(token_ids) == len(self._scheduled):
            self._rows.check(range(len(token_ids)))
            return [[token] for token in map(SampledToken, token_ids)]
        accepted_rows, first_row = [], 0
        for s in self._scheduled:
            num_accepted = _num_accepted(s, token_ids[first_row:]) if s.draft_token_ids else 0
            accepted_rows.append(range(first_row, first_row + 1 + num_accepted))
            first_row += 1 + len(s.draft_token_ids)
        self._rows.check(row for rows in accepted_rows for row in rows)
        logprobs = self._logprobs_of(accepted_rows) if self._are_scored else {}
        return [
            [SampledToken(token_ids[row], logprobs.get(row)) for row in rows]
            for rows in accepted_rows
        ]

    def _logprobs_of(self, accepted_rows: list[range]) -> dict[int, TokenLogprobs]:
        """Return log probabilities by row, for the requests that ask for them."""
        requested = [
            (row, k)
            for s, of_sequence in zip(self._scheduled, accepted_rows, strict=True)
            if (k := s.sequence.request.sampling.logprobs) is not None
            for row in of_sequence
        ]
        rows, num_tops = map(list, zip(*requested, strict=True))
        return dict(zip(rows, self._rows.logprobs_of(rows, num_tops), strict=True))


class HostRows:
    """Rows that were drawn on a CPU; implements `DrawnRows`."""

    def __init__(self, logits: Tensor | None, token_ids: Tensor) -> None:
        """`logits` [num_rows, vocab_size] are for log probabilities."""
        self._logits = logits
        self.token_ids = token_ids

    def result(self) -> list[int]:
        token_ids: list[int] = self.token_ids.tolist()
        return token_ids

    def check(self, rows: Iterable[int]) -> None:
        """Do nothing: the draw has raised the error."""

    def logprobs_of(self, rows: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
        assert self._logits is not None
        return logprobs_of(self._logits, rows, self.token_ids[rows].tolist(), num_tops)


class Draw(Protocol):
    """Draws the tokens of sequences and of their drafts."""

    def __call__(
        self, logits: Tensor, scheduled: list[ScheduledSequence], prompts: PromptRows | None = None
    ) -> DrawnBatch:
        """`logits` [num_rows, vocab_size] have one row for each sequence and one more for each
        draft. The log probabilities of `prompts` are stored by the time of the result.

        Raises the errors of `DrawnBatch.result`, or leaves them to it.
        """


@one_thread()
def draw_batch(
    logits: Tensor, scheduled: list[ScheduledSequence], prompts: PromptRows | None = None
) -> DrawnBatch:
    """Draw on a CPU; see `Draw`."""
    if prompts is not None:
        rows = list(range(len(prompts.positions)))
        prompts.record(logprobs_of(prompts.logits, rows, prompts.token_ids(), prompts.num_tops()))
    if not scheduled:
        no_rows = HostRows(None, torch.empty(0, dtype=torch.int64))
        return DrawnBatch(scheduled, no_rows, are_scored=False)
    try:
        token_ids = draw_tokens(logits, sequences_of_rows(scheduled, len(logits)))
    except InvalidRequest:
        if len(logits) == len(scheduled):
            raise
        # The row after a rejected draft may allow no token, which is not an error of the request.
        check_finite(logits.amax(-1))
        starts = accumulate([1 + len(s.draft_token_ids) for s in scheduled[:-1]], initial=0)
        undrafted = [ScheduledSequence(s.sequence, s.num_new_tokens, s.samples) for s in scheduled]
        return draw_batch(logits[list(starts)], undrafted)
    # Without the logits, their memory is free for the next batch.
    are_scored = has_logprobs(scheduled)
    drawn = HostRows(logits if are_scored else None, token_ids)
    return DrawnBatch(scheduled, drawn, are_scored=are_scored)


def has_logprobs(scheduled: list[ScheduledSequence]) -> bool:
    """Return whether any request asks for log probabilities of its tokens."""
    return {s.sequence.request.sampling.logprobs for s in scheduled} not in (set(), {None})


def sequences_of_rows(scheduled: list[ScheduledSequence], num_rows: int) -> list[Sequence]:
    """Return the sequence of each row of logits, with the drafts before it in its output."""
    if num_rows == len(scheduled):
        return [s.sequence for s in scheduled]
    return [
        _with_drafts(s, num_drafts) if num_drafts else s.sequence
        for s in scheduled
        for num_drafts in range(1 + len(s.draft_token_ids))
    ]


def _with_drafts(s: ScheduledSequence, num_drafts: int) -> Sequence:
    """Return the sequence with its first `num_drafts` drafts appended to the output."""
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
