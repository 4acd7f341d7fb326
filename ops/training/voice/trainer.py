"""The training of the talker, with checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ops.training.seeing.saving import save_half
from ops.training.trainer import MuonTrainer, Rates, cosine
from ops.training.voice.batches import IGNORED, Batch, Batches, Row
from ops.training.voice.talker import build_model, build_tokenizer

RATES = Rates(8e-3, 4e-3, cosine(last=0.02), warm_up_steps=60, decay=0.02, beta=0.95)


@dataclass(slots=True)
class Settings:
    seed: int
    out: Path
    checkpoint: Path
    minutes: float
    tokens: int
    width: int
    layers: int


class Trainer(MuonTrainer[Batch]):
    def __init__(self, settings: Settings, rows: Sequence[Row]) -> None:
        torch.manual_seed(settings.seed)
        self.model = build_model(settings.width, settings.layers)
        super().__init__(self.model, _is_hidden, RATES, settings.minutes, settings.checkpoint)
        self.settings, self.rows = settings, rows
        self.batches: Batches | None = None

    def draw(self) -> Batch:
        if self.batches is None:
            stream = f"{self.settings.seed}/train/{self.state.steps}"
            self.batches = Batches(self.rows, self.settings.tokens, stream)
        batch = self.batches.draw()
        self.state.samples += len(batch.ids)
        self.state.tokens += batch.ids.numel()
        return batch

    def loss(self, batch: Batch) -> torch.Tensor:
        base: Any = self.model.model
        hidden = base(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = batch.labels[:, 1:]
        here = wanted != IGNORED
        return F.cross_entropy(self.model.lm_head(hidden[here]), wanted[here])

    def save_result(self) -> None:
        save_half(self.model, build_tokenizer(), self.settings.out / "talker")


def _is_hidden(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1 and "embed" not in name
