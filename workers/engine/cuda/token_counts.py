"""Counts of the tokens of sequences with penalties, on the device.

A sequence has a row of counts, which is built when it starts or is resumed. Later steps only send
its new tokens. The row of a sequence that is not in a step may be taken by another sequence.
"""

from collections.abc import Sequence as Values
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.core.sequence import Sequence
from workers.engine.cuda.kernels.sampling import IN_PROMPT
from workers.engine.cuda.kernels.tiling import pad_to_power_of_two

_NO_PLACES = np.empty(0, np.int64)


@dataclass(slots=True)
class _Row:
    index: int
    num_counted: int = 0
    """Tokens of the sequence that are counted."""


class TokenCounts:
    """Table of counts: a row for each sequence, a column for each token."""

    def __init__(self, device: torch.device) -> None:
        self.table = torch.empty(0, 0, dtype=torch.int32, device=device)
        """int32 [num_rows, vocab_size]: the occurrences in the output, plus `IN_PROMPT` for a token
        of the prompt. It has as many rows as one step has needed."""
        self._rows: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()

    def assign(self, sequences: Values[Sequence], vocab_size: int) -> list[int]:
        """Return the row of each sequence, which may be a new one that `apply` builds."""
        new = [sequence for sequence in sequences if sequence not in self._rows]
        if new:
            used = {self._rows[s].index for s in sequences if s in self._rows}
            free = [i for i in range(len(self.table)) if i not in used]
            if len(free) < len(new):
                free += self._add_rows(len(used) + len(new), vocab_size)
            for sequence in [s for s, row in self._rows.items() if row.index not in used]:
                del self._rows[sequence]
            for sequence, index in zip(new, free, strict=False):
                self._rows[sequence] = _Row(index)
        return [self._rows[sequence].index for sequence in sequences]

    def _add_rows(self, num_rows: int, vocab_size: int) -> range:
        """Add rows until there are at least `num_rows`; return the new rows."""
        num_before = len(self.table)
        rows = pad_to_power_of_two(num_rows)
        table = self.table.new_empty(rows, vocab_size)
        if num_before:
            table[:num_before] = self.table
        self.table = table
        return range(num_before, rows)

    def list_new(self, sequences: Values[Sequence]) -> list[NDArray[np.int64]]:
        """Return the new rows, and the places in the table of the prompts' tokens in them and of
        new tokens of the output. The tokens are counted from now on."""
        if not sequences:
            return [_NO_PLACES] * 3
        vocab_size = self.table.shape[1]
        cleared: list[int] = []
        in_prompt, in_output = [_NO_PLACES], [_NO_PLACES]
        for sequence in sequences:
            row, num_prompt = self._rows[sequence], sequence.num_prompt_tokens
            first = row.index * vocab_size
            if row.num_counted == 0:
                cleared.append(row.index)
                in_prompt.append(first + np.array(sequence.token_ids[:num_prompt], np.int64))
                row.num_counted = num_prompt
            if new := sequence.token_ids[row.num_counted :]:
                in_output.append(first + np.array(new, np.int64))
                row.num_counted += len(new)
        return [np.array(cleared, np.int64), np.concatenate(in_prompt), np.concatenate(in_output)]

    def apply(self, cleared: Tensor, in_prompt: Tensor, in_output: Tensor) -> None:
        """Count the tokens that `list_new` has returned."""
        places = self.table.view(-1)
        if len(cleared):
            self.table.index_fill_(0, cleared, 0)
            places.index_fill_(0, in_prompt, IN_PROMPT)
        if len(in_output):
            places.index_add_(0, in_output, torch.ones_like(in_output, dtype=torch.int32))

    def forget(self) -> None:
        """Build all rows again: a step has failed, so tokens may not have been counted."""
        self._rows.clear()
