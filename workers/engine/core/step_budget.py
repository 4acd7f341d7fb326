"""Budget of one step of the scheduler: the numbers of tokens of each kind that are left."""

from workers.engine.core.batch_lane import BatchLane
from workers.engine.core.sequence import ScheduledSequence, Sequence

MAX_PROMPT_LOGITS = 256
"""Limit of a step on prompt tokens with logits, in addition to sampled tokens: a row of 152,000
logits in float32 has 0.6 MB and takes a millisecond to process."""


class StepBudget:
    """Sequences scheduled in the current step, and the tokens left of its budget."""

    def __init__(self, budget: int, lane: BatchLane) -> None:
        self.budget = budget
        self.prompt_tokens = budget
        """Tokens that prefills may still have in this step, out of the budget."""
        self._lane = lane
        self.prompt_logits = MAX_PROMPT_LOGITS
        """Prompt tokens that may still have logits in this step."""
        self.scheduled: dict[Sequence, ScheduledSequence] = {}

    @property
    def has_interactive(self) -> bool:
        return not all(sequence.is_batch for sequence in self.scheduled)

    def can_start(self, sequence: Sequence, num_cached: int = 0) -> bool:
        """Return whether a waiting sequence can have tokens in this step."""
        if sequence.is_batch and not self._lane.may_start(sequence, num_cached):
            return False
        return self.max_new_tokens(sequence, num_cached) > 0

    def max_new_tokens(self, sequence: Sequence, num_cached: int = 0) -> int:
        """Return the budget for a sequence, limited by the logits if all its tokens need them.

        `num_cached` tokens of a sequence that has not started need not be computed. A span that
        comes next may exceed the limits, because it cannot be divided.
        """
        budget = self.budget
        if sequence.num_uncomputed_tokens > 1:
            budget = min(budget, self.prompt_tokens)
        if sequence.is_batch:
            budget = min(budget, self._lane.tokens_left(sequence, num_cached))
        if sequence.prompt_logprobs is not None:
            budget = min(budget, self.prompt_logits)
        return sequence.round_to_spans(budget, num_cached) if budget > 0 else 0

    def add(self, s: ScheduledSequence) -> None:
        self.scheduled[s.sequence] = s
        self._spend(s, s.num_new_tokens)
        if s.sequence.is_batch:
            self._lane.add(s.sequence, s.num_new_tokens)

    def remove_sequence(self, sequence: Sequence) -> None:
        if (s := self.scheduled.pop(sequence, None)) is not None:
            self._spend(s, -s.num_new_tokens)
            if sequence.is_batch:
                self._lane.remove(sequence, s.num_new_tokens)

    def _spend(self, s: ScheduledSequence, num_tokens: int) -> None:
        self.budget -= num_tokens
        if s.num_new_tokens > 1 or not s.samples:
            self.prompt_tokens -= num_tokens
        if s.sequence.prompt_logprobs is not None:
            self.prompt_logits -= num_tokens

    def add_drafts(self, sequence: Sequence, draft_token_ids: list[int]) -> None:
        s = self.scheduled[sequence]
        num_new_tokens = s.num_new_tokens + len(draft_token_ids)
        self.scheduled[sequence] = ScheduledSequence(
            sequence, num_new_tokens, s.samples, s.copy, tuple(draft_token_ids)
        )
        self.budget -= len(draft_token_ids)
