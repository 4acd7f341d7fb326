"""Rules of the batch lane: which of its sequences may start in a step, and their tokens. Pure.

While interactive sequences run, the batch lane may lengthen a step by at most half, and always gets
one token. Its items are not encoded in such a step, unless the sequence with the best priority is a
batch sequence. Between interactive sequences, steps of the batch lane are short, with one item at
most.
"""

import math

from workers.engine.core.sequence import Sequence
from workers.engine.core.step_cost import StepCost, max_batch_tokens

RECENT_STEPS = 1000
"""Steps since the last one with interactive sequences after which none are expected any more."""


class BatchLane:
    """What the sequences of the batch lane may still have in the current step."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._num_steps = 0
        self._last_interactive = -math.inf
        """Number of the last step that had interactive sequences to schedule."""
        self._tokens = 0
        """Tokens that batch sequences may still have in this step."""
        self._items: int | None = None
        """Items of the batch lane that may still be encoded in this step; None for any number."""
        self._is_item_awaited = False
        """Whether a waiting sequence needs an item of the batch lane, and none is left for it."""

    def begin_step(self, budget: int, num_interactive: int, is_first: bool) -> None:
        """Set the limits of a step of `budget` tokens, of which interactive sequences have some.

        `is_first` is true if the sequence with the best priority is a batch sequence.
        """
        self._num_steps += 1
        self._is_item_awaited = False
        if num_interactive:
            self._last_interactive = self._num_steps
        elif self._num_steps - self._last_interactive > RECENT_STEPS:
            self._tokens, self._items = budget, None
            return
        limit = max_batch_tokens(self._cost, num_interactive)
        self._tokens = budget if limit is None else min(budget, limit)
        self._items = 1 if num_interactive == 0 or is_first else 0

    @property
    def has_no_items(self) -> bool:
        """Whether no item of the batch lane may be encoded in this step."""
        return self._items == 0

    def allow_item(self) -> None:
        """Allow an item, because no interactive sequence is in the step after all."""
        self._items, self._is_item_awaited = 1, False

    def may_start(self, sequence: Sequence, num_cached: int = 0) -> bool:
        """Return whether a waiting sequence of the batch lane can have tokens in this step.

        Once a sequence cannot start because of an item, no other sequence with items can.
        `num_cached` tokens of the sequence need not be computed.
        """
        if self._items is not None:
            starts = sequence.starts_of_items(num_cached)
            is_next = starts[self._items : self._items + 1] == [0]
            if is_next or (starts and self._is_item_awaited):
                self._is_item_awaited = True
                return False
        return self.tokens_left(sequence, num_cached) > 0

    def tokens_left(self, sequence: Sequence, num_cached: int = 0) -> int:
        """Return the limit on new tokens of a sequence of the batch lane in this step."""
        if self._items is None:
            return self._tokens
        return min(self._tokens, sequence.num_tokens_before_item(self._items, num_cached))

    def spend_items(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the items that the next tokens of a sequence begin."""
        if self._items is not None:
            self._items -= sequence.num_items_begun(num_tokens)

    def spend_tokens(self, num_tokens: int) -> None:
        """Count tokens of a sequence; fewer than 0 if it was removed from the step."""
        self._tokens -= num_tokens
