"""Drafts of a sequence's next tokens: what followed when the same tokens stood there before.

This is prompt lookup (n-gram speculation): answers that quote their prompt, or repeat themselves,
are drafted right for long stretches, and no second model is needed.
"""

REGAIN = 1 / 8
"""Of one draft's credit, at each step at which a sequence has none."""


class NgramIndex:
    """Where each n-gram of one sequence has stood last; of lengths `min_ngram` to `max_ngram`.

    It follows a sequence that only grows, at the cost of a few dictionary entries for each token.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        """How many tokens there are up to the end of the n-gram; where a token follows it."""
        self._num_followed = 0
        """Ends up to this one are indexed."""

    def find(self, token_ids: list[int]) -> int | None:
        """The place behind the latest earlier occurrence of the longest n-gram that ends the
        sequence; None if not even the shortest has occurred."""
        self._follow(token_ids)
        for length in self._lengths:
            end = self._ends.get(tuple(token_ids[-length:]))
            if end is not None:
                return end
        return None

    def _follow(self, token_ids: list[int]) -> None:
        for end in range(self._num_followed + 1, len(token_ids)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(token_ids[end - length : end])] = end
        self._num_followed = max(self._num_followed, len(token_ids) - 1)


class DraftBudget:
    """How many drafts a sequence may have: more while they hold, fewer while they fail.

    An accepted draft earns one, and a rejected one costs half: all of the credit is kept as long as
    a third of the drafts hold. A sequence without credit tries one draft again every few steps.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._credit = float(most)

    def grant(self) -> int:
        """Once for each step."""
        if self._credit < 1:
            self._credit += REGAIN
        return int(self._credit)

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        earned = num_accepted - (num_drafts - num_accepted) / 2
        self._credit = min(max(self._credit + earned, 0.0), float(self._most))


class NgramDrafter:
    """Of one sequence; see `workers.engine.core.sequence.Drafter`."""

    def __init__(self, num_tokens: int, min_ngram: int, max_ngram: int) -> None:
        """Drafts of `num_tokens` tokens at most."""
        self._index = NgramIndex(min_ngram, max_ngram)
        self._credit = DraftBudget(num_tokens)

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        num_drafts = min(self._credit.grant(), most)
        start = self._index.find(token_ids) if num_drafts > 0 else None
        if start is None:
            return []
        # Where what followed reaches the end, it begins again: so it is with what goes in circles.
        period = len(token_ids) - start
        return [token_ids[start + i % period] for i in range(num_drafts)]

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        self._credit.learn(num_drafts, num_accepted)
