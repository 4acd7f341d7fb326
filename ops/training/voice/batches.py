"""Batches of prompts and codes in a few fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ops.training.voice.codec import NUM_CODES
from ops.training.voice.talker import CODE_OFFSET, END_ID, PAD_ID
from ops.training.voice.texts import Kind

LENGTH_STEP = 32
# How much more often than a description an answer is drawn: the few short ones are what the demo
# says most, and have to be known by heart.
WEIGHTS: dict[Kind, float] = {"short": 30.0, "sentence": 30.0, "description": 1.0}
# This part of the codes that the model looks back on is wrong, so that it learns to find its way.
WRONG_SHARE = 0.08
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Row:
    prompt: list[int]
    codes: list[int]
    kind: Kind

    @property
    def length(self) -> int:
        """Tokens of prompt, codes and the end, rounded up."""
        return -(-(len(self.prompt) + len(self.codes) + 1) // LENGTH_STEP) * LENGTH_STEP


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor
    labels: Tensor


class Batches:
    """Draws rows of one length by their weights; every batch has about as many tokens."""

    def __init__(self, rows: Sequence[Row], tokens: int, seed: str) -> None:
        self.tokens = tokens
        self.random = np.random.default_rng(list(seed.encode()))
        self.noise = torch.Generator().manual_seed(int(self.random.integers(2**31)))
        self.groups: dict[int, list[Row]] = {}
        for row in rows:
            self.groups.setdefault(row.length, []).append(row)
        self.lengths = sorted(self.groups)
        self.weights = {
            length: np.array([WEIGHTS[row.kind] for row in group])
            for length, group in self.groups.items()
        }
        shares = np.array([length * self.weights[length].sum() for length in self.lengths])
        self.shares = shares / shares.sum()
        self.queues: dict[int, list[Row]] = {length: [] for length in self.lengths}

    def draw(self) -> Batch:
        length = int(self.random.choice(self.lengths, p=self.shares))
        queue, size = self.queues[length], max(1, self.tokens // length)
        while len(queue) < size:
            queue += self.shuffled(length)
        rows = [queue.pop() for _ in range(size)]
        ids = torch.full((size, length), PAD_ID)
        labels = torch.full((size, length), IGNORED)
        for number, row in enumerate(rows):
            first = len(row.prompt)
            tokens = torch.tensor([*(code + CODE_OFFSET for code in row.codes), END_ID])
            ids[number, :first] = torch.tensor(row.prompt)
            ids[number, first : first + len(tokens)] = tokens
            labels[number, first : first + len(tokens)] = tokens
        return Batch(self.disturbed(ids), labels)

    def shuffled(self, length: int) -> list[Row]:
        """A pass over the rows of one length; those of weight n come n times."""
        group, weights = self.groups[length], self.weights[length]
        times = np.repeat(np.arange(len(group)), weights.astype(int))
        return [group[number] for number in self.random.permutation(times)]

    def disturbed(self, ids: Tensor) -> Tensor:
        is_code = (ids >= CODE_OFFSET) & (ids < CODE_OFFSET + NUM_CODES)
        wrong = is_code & (torch.rand(ids.shape, generator=self.noise) < WRONG_SHARE)
        others = torch.randint(NUM_CODES, ids.shape, generator=self.noise) + CODE_OFFSET
        return torch.where(wrong, others, ids)
