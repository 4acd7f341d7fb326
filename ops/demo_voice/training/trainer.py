"""The training of the talker, with checkpoints and a rate that follows the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ops.demo_training.saving import save_half
from ops.demo_training.scenes import console
from ops.demo_voice.training.batches import IGNORED, Batch, Batches, Row
from ops.demo_voice.training.talker import build_model, build_tokenizer

WARM_UP_STEPS = 60
SAVE_EVERY_S = 120.0
TELL_EVERY_S = 30.0
# A step that takes longer was interrupted; the interruption is no time of training.
LONGEST_STEP_S = 10.0
HIDDEN_RATE, OTHER_RATE = 8e-3, 4e-3
LAST_RATE = 0.02


@dataclass(slots=True)
class State:
    """How far the training is; kept in the checkpoint."""

    elapsed: float = 0.0
    cpu: float = 0.0
    steps: int = 0
    answers: int = 0
    tokens: int = 0
    loss: float = float("nan")


@dataclass(slots=True)
class Settings:
    seed: int
    out: Path
    checkpoint: Path
    minutes: float
    tokens: int
    width: int
    layers: int


class Trainer:
    """A model with its two optimizers: Muon for matrices between layers, AdamW for the rest."""

    def __init__(self, settings: Settings, rows: Sequence[Row]) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.rows = rows
        self.model = build_model(settings.width, settings.layers)
        hidden: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            is_hidden = parameter.dim() > 1 and "embed" not in name
            (hidden if is_hidden else others).append(parameter)
        muon = torch.optim.Muon(
            hidden, lr=HIDDEN_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (muon, HIDDEN_RATE),
            (adam, OTHER_RATE),
        ]
        self.state = State()

    def load(self) -> None:
        kept = torch.load(self.settings.checkpoint)
        self.model.load_state_dict(kept["model"])
        self.state = State(**kept["state"])
        for (optimizer, _), state in zip(self.optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> None:
        kept = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "state": asdict(self.state),
        }
        # Written beside and renamed, so that a stop in the middle leaves the former one whole.
        part = self.settings.checkpoint.with_suffix(".part")
        torch.save(kept, part)
        part.replace(self.settings.checkpoint)
        save_half(self.model, build_tokenizer(), self.settings.out / "talker")

    def loss(self, batch: Batch) -> torch.Tensor:
        base: Any = self.model.model
        hidden = base(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = batch.labels[:, 1:]
        here = wanted != IGNORED
        return F.cross_entropy(self.model.lm_head(hidden[here]), wanted[here])

    def step(self, batch: Batch, progress: float) -> float:
        warm = min(1.0, (self.state.steps + 1) / WARM_UP_STEPS)
        fall = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        loss = self.loss(batch)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * warm * fall
            optimizer.step()
        return loss.item()

    def run(self) -> None:
        """Trains until the time is over."""
        settings, state = self.settings, self.state
        stream = f"{settings.seed}/train/{state.steps}"
        batches = Batches(self.rows, settings.tokens, stream)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        console.log(f"{parameters:,} parameters, {len(self.rows):,} answers")
        self.model.train()
        cpu = time.process_time() - state.cpu
        last = saved = told = time.monotonic()
        while state.elapsed < 60 * settings.minutes:
            batch = batches.draw()
            loss = self.step(batch, state.elapsed / (60 * settings.minutes))
            state.loss = loss if math.isnan(state.loss) else 0.98 * state.loss + 0.02 * loss
            now = time.monotonic()
            state.elapsed += min(now - last, LONGEST_STEP_S)
            state.cpu = time.process_time() - cpu
            last = now
            state.steps += 1
            state.answers += len(batch.ids)
            state.tokens += batch.ids.numel()
            if now - told > TELL_EVERY_S:
                console.log(told_of(state))
                told = now
            if now - saved > SAVE_EVERY_S:
                self.save()
                saved = now
        self.save()
        console.log(f"ended: {told_of(state)}")


def told_of(state: State) -> str:
    return (
        f"{state.elapsed / 60:.1f} min, {state.cpu / 60:.1f} of CPU, step {state.steps}, "
        f"{state.answers:,} answers, loss {state.loss:.3f}, {state.tokens / state.cpu:.0f} tokens/s"
    )
