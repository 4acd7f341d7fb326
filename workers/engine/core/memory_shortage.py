"""Reaction to a step for which the device has too little memory: smaller steps for a while. Pure.

The failed step is dropped, and its sequences are scheduled again. First as before, because the
runner has given unused memory back; then with half of the prompt tokens, as often as this is
possible; then without the sequence of the lowest priority. A request fails only if it is alone.
"""

import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from workers.engine.core.sequence import Batch

HOLD_S = 60.0
"""Time for which steps stay smaller after the last error."""

Action: TypeAlias = Literal["retry", "cut", "preempt", "fail"]
"""`retry` the step, `cut` its prompts, `preempt` a sequence, or `fail` the only request."""


class MemoryShortage:
    """Limits on steps, which hold for `HOLD_S` after an error."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = {"retry": 0, "cut": 0, "preempt": 0, "fail": 0}
        """Reactions since the start."""
        self._clock = clock
        self._until_s = 0.0
        self._prompt_tokens: int | None = None
        self._num_seqs: int | None = None
        self._is_repeated = False
        """Whether the last step has failed too."""

    @property
    def is_present(self) -> bool:
        """Whether steps are limited now."""
        if self._clock() >= self._until_s:
            self._prompt_tokens = self._num_seqs = None
        return self._prompt_tokens is not None or self._num_seqs is not None

    def limit_prompt_tokens(self, num_tokens: int) -> int:
        """Return the number of prompt tokens that a step may have, at most `num_tokens`."""
        if not self.is_present or self._prompt_tokens is None:
            return num_tokens
        return min(num_tokens, self._prompt_tokens)

    def limit_seqs(self, num_seqs: int) -> int:
        """Return the number of sequences that may run, at most `num_seqs`."""
        if not self.is_present or self._num_seqs is None:
            return num_seqs
        return min(num_seqs, self._num_seqs)

    def react(self, batch: Batch) -> Action:
        """Return the reaction to the error of a batch, and set the limits of the next steps."""
        action = self._choose(batch)
        self.counts[action] += 1
        self._is_repeated = True
        self._until_s = self._clock() + HOLD_S
        return action

    def end_step(self) -> None:
        """Record that a step has been computed."""
        self._is_repeated = False

    def _choose(self, batch: Batch) -> Action:
        if not self._is_repeated:
            return "retry"
        num_drafts = sum(len(s.draft_token_ids) for s in batch.scheduled)
        num_tokens = batch.work().num_prompt_tokens + num_drafts
        limit = max(1, num_tokens // 2)
        # A span is never divided, so a smaller limit may not change its step.
        if num_tokens and limit < self.limit_prompt_tokens(num_tokens):
            self._prompt_tokens = limit
            return "cut"
        num_seqs = len(batch.scheduled)
        if num_seqs > 1:
            self._num_seqs = num_seqs - 1
            return "preempt"
        return "fail"
