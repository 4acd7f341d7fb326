"""Training of the talker on prompts and codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.training.saving import save_half
from ops.training.trainer import State, Task, cosine, divided, muon_and_adamw
from ops.training.voice.codec import NUM_CODES
from ops.training.voice.talker import CODE_OFFSET, END_ID, PAD_ID, build_model, build_tokenizer
from ops.training.voice.texts import Kind

LENGTH_STEP = 32
# Weight of an answer among those that are drawn. The demo says short answers most, and the talker
# has to know them by heart.
WEIGHTS: dict[Kind, float] = {"short": 30.0, "sentence": 30.0, "description": 1.0}
# This part of the codes in the context is wrong, so that the talker learns to recover from errors.
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

    @property
    def num_samples(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()


class Batches:
    """Draws rows of one length by their weights. Every batch has about as many tokens."""

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
        """Return the rows of one length in random order, each as often as its weight."""
        group, weights = self.groups[length], self.weights[length]
        times = np.repeat(np.arange(len(group)), weights.astype(int))
        return [group[number] for number in self.random.permutation(times)]

    def disturbed(self, ids: Tensor) -> Tensor:
        is_code = (ids >= CODE_OFFSET) & (ids < CODE_OFFSET + NUM_CODES)
        wrong = is_code & (torch.rand(ids.shape, generator=self.noise) < WRONG_SHARE)
        others = torch.randint(NUM_CODES, ids.shape, generator=self.noise) + CODE_OFFSET
        return torch.where(wrong, others, ids)


class Talker(Task[Batch]):
    def __init__(
        self, rows: Sequence[Row], out: Path, seed: int, tokens: int, width: int, layers: int
    ) -> None:
        torch.manual_seed(seed)
        self.rows, self.out, self.seed, self.tokens = rows, out, seed, tokens
        self.network = self.model = build_model(width, layers)
        parts = divided(self.model, lambda name, p: p.dim() > 1 and "embed" not in name)
        self.optimizers = muon_and_adamw(*parts, rates=(8e-3, 4e-3), decay=0.02, beta=0.95)

    def fall(self, progress: float) -> float:
        return cosine(progress)

    def draw(self, steps: int, progress: Synchronized[float]) -> Iterator[Batch]:
        batches = Batches(self.rows, self.tokens, f"{self.seed}/train/{steps}")
        while True:
            yield batches.draw()

    def loss(self, batch: Batch, progress: float) -> tuple[Tensor, dict[str, float]]:
        base: Any = self.model.model
        hidden = base(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
        labels = batch.labels[:, 1:]
        is_label = labels != IGNORED
        return F.cross_entropy(self.model.lm_head(hidden[is_label]), labels[is_label]), {}

    def save(self, weights: Mapping[str, Tensor], state: State) -> None:
        save_half(self.model, build_tokenizer(), self.out / "talker", weights)
