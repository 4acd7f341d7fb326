"""Tokens for each sequence that samples, from the logits of all its rows: which drafts hold.

Each place's token is sampled as it always is, as if the drafts before it were the answer; while it
is the draft that stands there, the next row counts as well. A row that counts has therefore seen
the answer's own tokens and nothing else. And a sampled token depends on its logits and on (seed,
choice, position), not on a random state that drafts could move. So with any sampling parameters the
answer is the one that it would be without drafts, and a resume goes on as it began wherever the
log was cut. (Rejection sampling would keep only the distribution.)
"""

from dataclasses import replace

from torch import Tensor

from shared.errors import InvalidRequest
from shared.protocol.messages import TokenLogprobs
from workers.engine.core.sequence import SampledToken, ScheduledSequence, Sequence
from workers.engine.sampling.logprobs import logprobs_of
from workers.engine.sampling.sampler import check_finite, sample


def sample_batch(logits: Tensor, scheduled: list[ScheduledSequence]) -> list[list[SampledToken]]:
    """`logits` [num_rows, vocab_size] are of each sequence one row, and one more for each draft.

    Returns the accepted drafts and the token behind them. Raises what `sample` raises; and
    ArithmeticError for a rejected draft too, for its row tells whether its keys and values are
    numbers: they stay in the cache, masked, until they are overwritten.
    """
    places = [(s, place) for s in scheduled for place in range(1 + len(s.draft_token_ids))]
    try:
        token_ids = sample(logits, [_ahead(s, place) for s, place in places])
    except InvalidRequest:
        if len(places) == len(scheduled):
            raise
        # Behind a draft that is rejected there may be no token that is allowed.
        check_finite(logits.amax(-1))
        certain = [row for row, (_, place) in enumerate(places) if place == 0]
        return sample_batch(logits[certain], [replace(s, draft_token_ids=()) for s in scheduled])
    kept, first_row = [], 0
    for s in scheduled:
        kept.append(range(first_row, first_row + 1 + _num_accepted(s, token_ids[first_row:])))
        first_row += 1 + len(s.draft_token_ids)
    logprobs = _logprobs(logits, scheduled, kept, token_ids)
    return [[SampledToken(token_ids[row], logprobs.get(row)) for row in rows] for rows in kept]


def _ahead(s: ScheduledSequence, num_drafts: int) -> Sequence:
    """The sequence with so many of its drafts as part of the answer."""
    if num_drafts == 0:
        return s.sequence
    token_ids = [*s.sequence.token_ids, *s.draft_token_ids[:num_drafts]]
    return replace(s.sequence, token_ids=token_ids)


def _num_accepted(s: ScheduledSequence, token_ids: list[int]) -> int:
    num_accepted = 0
    for draft, token_id in zip(s.draft_token_ids, token_ids, strict=False):
        if draft != token_id:
            break
        num_accepted += 1
    return num_accepted


def _logprobs(
    logits: Tensor, scheduled: list[ScheduledSequence], kept: list[range], token_ids: list[int]
) -> dict[int, TokenLogprobs]:
    """By row, where the request asks for them."""
    asked = [
        (row, k)
        for s, of_sequence in zip(scheduled, kept, strict=True)
        if (k := s.sequence.request.sampling.logprobs) is not None
        for row in of_sequence
    ]
    if not asked:
        return {}
    rows, num_tops = map(list, zip(*asked, strict=True))
    found = logprobs_of(logits, rows, [token_ids[row] for row in rows], num_tops)
    return dict(zip(rows, found, strict=True))
