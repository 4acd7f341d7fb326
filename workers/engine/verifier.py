"""Tokens for each sequence that samples, from the logits of all its rows: which drafts hold.

Each place's token is sampled as it always is, as if the drafts before it were the answer; if it is
the draft that stands there, the next row counts as well. A row that counts has therefore seen the
answer's own tokens and nothing else. And a sampled token depends on its logits and on (seed,
choice, position), not on a random state that drafts could move. So with any sampling parameters the
answer is the one that it would be without drafts, and a resume goes on as it began wherever the
log was cut. (Rejection sampling would keep only the distribution.)
"""

from dataclasses import replace

from torch import Tensor

from workers.engine.logprobs import logprobs_of
from workers.engine.sampler import check_finite, sample
from workers.engine.sequence import SampledToken, ScheduledSequence, Sequence


def sample_batch(logits: Tensor, scheduled: list[ScheduledSequence]) -> list[list[SampledToken]]:
    """`logits` [num_rows, vocab_size] are of each sequence one row, and one more for each draft.

    Returns the accepted drafts and the token behind them. Raises what `sample` raises, and
    ArithmeticError for a rejected draft too: what it has left in the cache is still masked, not
    gone, when the blocks are somebody else's.
    """
    first_rows, num_rows = [], 0
    for s in scheduled:
        first_rows.append(num_rows)
        num_rows += 1 + len(s.draft_token_ids)
    tokens: list[list[SampledToken]] = [[] for _ in scheduled]
    left = list(range(len(scheduled)))
    while left:
        rows = [first_rows[i] + len(tokens[i]) for i in left]
        sampled = _sample(
            logits if len(rows) == num_rows else logits[rows],
            [_ahead(scheduled[i].sequence, tokens[i]) for i in left],
        )
        for i, token in zip(left, sampled, strict=True):
            tokens[i].append(token)
        left = [i for i in left if _holds(scheduled[i], tokens[i])]
    _check_rejected(logits, first_rows, scheduled, tokens)
    return tokens


def _ahead(sequence: Sequence, tokens: list[SampledToken]) -> Sequence:
    """As it will be with these tokens."""
    if not tokens:
        return sequence
    token_ids = [*sequence.token_ids, *(token.token_id for token in tokens)]
    return replace(sequence, token_ids=token_ids)


def _holds(s: ScheduledSequence, tokens: list[SampledToken]) -> bool:
    """Whether there is a draft in the place of the last token, and it is that."""
    place = len(tokens) - 1
    return place < len(s.draft_token_ids) and s.draft_token_ids[place] == tokens[-1].token_id


def _check_rejected(
    logits: Tensor,
    first_rows: list[int],
    scheduled: list[ScheduledSequence],
    tokens: list[list[SampledToken]],
) -> None:
    rejected = [
        first_row + place
        for first_row, s, taken in zip(first_rows, scheduled, tokens, strict=True)
        for place in range(len(taken), 1 + len(s.draft_token_ids))
    ]
    if rejected:
        check_finite(logits[rejected].amax(-1))


def _sample(logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    token_ids = sample(logits, sequences)
    tokens = [SampledToken(token_id) for token_id in token_ids]
    asked = [
        (i, k) for i, s in enumerate(sequences) if (k := s.request.sampling.logprobs) is not None
    ]
    if asked:
        rows, num_tops = map(list, zip(*asked, strict=True))
        logprobs = logprobs_of(logits, rows, [token_ids[row] for row in rows], num_tops)
        for row, found in zip(rows, logprobs, strict=True):
            tokens[row] = SampledToken(token_ids[row], found)
    return tokens
