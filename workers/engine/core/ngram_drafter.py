"""Prompt lookup decoding: drafts are the tokens that followed the same n-gram earlier.

The algorithm is Apoorv Saxena's prompt lookup decoding (2023), vLLM's `ngram` speculation. Outputs
that quote their prompt or repeat themselves are drafted correctly for long stretches, without a
second model.
"""

CREDIT_PER_STEP = 1 / 8
"""Credit that a sequence without credit regains per step, in drafts."""


class NgramIndex:
    """Index of the last position of each n-gram of one sequence, `min_ngram` to `max_ngram` long.

    The sequence may only grow. Each token costs one dictionary entry per n-gram length.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._end_of: dict[tuple[int, ...], int] = {}
        """Number of tokens up to the end of each n-gram that is followed by a token."""
        self._num_indexed = 0
        """N-grams that end at or before this many tokens are indexed."""

    def find(self, token_ids: list[int]) -> int | None:
        """Return the position after the last earlier occurrence of the sequence's final n-gram.

        Longer n-grams are tried first. Returns None if none has occurred.
        """
        self._index_new(token_ids)
        for length in self._lengths:
            end = self._end_of.get(tuple(token_ids[-length:]))
            if end is not None:
                return end
        return None

    def _index_new(self, token_ids: list[int]) -> None:
        for end in range(self._num_indexed + 1, len(token_ids)):
            for length in self._lengths:
                if length <= end:
                    self._end_of[tuple(token_ids[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


class DraftBudget:
    """Adaptive limit on drafts: it grows while drafts are accepted and shrinks while they are not.

    An accepted draft earns one credit and a rejected draft costs half a credit, so the credit stays
    at its maximum while a third of the drafts are accepted. A sequence without credit tries one
    draft again every few steps.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._credit = float(max_drafts)

    def grant(self) -> int:
        """Return the number of drafts for this step. Must be called once per step."""
        if self._credit < 1:
            self._credit += CREDIT_PER_STEP
        return int(self._credit)

    def record_result(self, num_drafts: int, num_accepted: int) -> None:
        earned = num_accepted - (num_drafts - num_accepted) / 2
        self._credit = min(max(self._credit + earned, 0.0), float(self._max_drafts))


class NgramDrafter:
    """Drafter of one sequence; implements `workers.engine.core.sequence.Drafter`."""

    def __init__(self, num_tokens: int, min_ngram: int, max_ngram: int) -> None:
        """`num_tokens` limits the drafts per step."""
        self._index = NgramIndex(min_ngram, max_ngram)
        self._budget = DraftBudget(num_tokens)

    def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
        num_drafts = min(self._budget.grant(), max_drafts)
        start = self._index.find(token_ids) if num_drafts > 0 else None
        if start is None:
            return []
        # The continuation wraps around at the end, as it does in text that repeats itself.
        period = len(token_ids) - start
        return [token_ids[start + i % period] for i in range(num_drafts)]

    def record_result(self, num_drafts: int, num_accepted: int) -> None:
        self._budget.record_result(num_drafts, num_accepted)
