"""Rows of a flat batch: the tokens of each sequence, and those with logits or hidden states."""

from collections.abc import Sequence
from itertools import accumulate

from workers.engine.core.sequence import ScheduledSequence
from workers.engine.pooling import num_pooled_rows
from workers.engine.sampling.logprobs import num_prompt_rows


class StepRows:
    """Rows of the sequences of a step."""

    def __init__(self, scheduled: list[ScheduledSequence]) -> None:
        self._scheduled = scheduled
        self.starts = [0, *accumulate([s.num_new_tokens for s in scheduled])]
        """First row of each sequence, and the number of all rows."""
        self.logits: list[int] = []
        """Rows with logits: first the sampled rows, then rows that predict tokens of prompts."""
        for s, stop in zip(scheduled, self.starts[1:], strict=True):
            if s.draft_token_ids:
                self.logits += range(stop - 1 - len(s.draft_token_ids), stop)
            elif s.samples_token:
                self.logits.append(stop - 1)
        self.num_sampled = len(self.logits)
        for s, start in zip(scheduled, self.starts, strict=False):
            if s.sequence.prompt_logprobs is not None:
                self.logits += range(start, start + num_prompt_rows(s))
        self.pooled = [
            i
            for i, s in enumerate(scheduled)
            if not s.sequence.samples_tokens and num_pooled_rows(s)
        ]
        """Indexes of the sequences with rows that are pooled."""

    def pooled_rows(self) -> list[int]:
        stops = [(self.starts[i + 1], num_pooled_rows(self._scheduled[i])) for i in self.pooled]
        return [row for stop, num_rows in stops for row in range(stop - num_rows, stop)]

    def sampled_of(self, indexes: Sequence[int]) -> list[int]:
        """Return the indexes among the sampled rows of the rows of these sequences."""
        sizes = [1 + len(s.draft_token_ids) if s.samples_token else 0 for s in self._scheduled]
        firsts = [0, *accumulate(sizes)]
        return [row for i in indexes for row in range(firsts[i], firsts[i + 1])]
