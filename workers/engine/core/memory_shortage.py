"""Reaction to a step for which the device has too little memory: smaller steps for a while. Pure.

The failed step is dropped, and its sequences are scheduled again. First as before, because the
runner has given unused memory back; then with half of the prompt tokens, as often as this is
possible; then without the sequence of the lowest priority. A request fails only if it is alone.
"""

from typing import Literal, TypeAlias

from workers.engine.core.sequence import Batch

HOLD_S = 60.0
"""Time of computed steps for which they stay smaller after the last error."""

Action: TypeAlias = Literal["retry", "cut", "preempt", "fail"]
"""`retry` the step, `cut` its prompts, `preempt` a sequence, or `fail` the only request."""


class MemoryShortage:
    """Limits on steps, which hold for `HOLD_S` after an error."""

    def __init__(self) -> None:
        self.counts = {"retry": 0, "cut": 0, "preempt": 0, "fail": 0}
        """Reactions since the start."""
        self._left_s = 0.0
        self._prompt_tokens: int | None = None
        self._num_seqs: int | None = None
        self._is_repeated = False
        """Whether the last step has failed too."""

    @property
    def is_present(self) -> bool:
        """Whether steps are limited now."""
        return self._prompt_tokens is not None or self._num_seqs is not None

    def limit_prompt_tokens(self, num_tokens: int) -> int:
        """Return the number of prompt tokens that a step may have, at most `num_tokens`."""
        return min(num_tokens, self._prompt_tokens or num_tokens)

    def limit_seqs(self, num_seqs: int) -> int:
        """Return the number of sequences that may run, at most `num_seqs`."""
        return min(num_seqs, self._num_seqs or num_seqs)

    def react(self, batch: Batch) -> Action:
        """Return the reaction to the error of a batch, and set the limits of the next steps."""
        action = self._choose(batch)
        self.counts[action] += 1
        self._is_repeated = True
        self._left_s = HOLD_S
        return action

    def end_step(self, seconds: float) -> None:
        """Record that a step has been computed, and its time."""
        self._is_repeated = False
        self._left_s -= seconds
        if self._left_s <= 0:
            self._prompt_tokens = self._num_seqs = None

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
