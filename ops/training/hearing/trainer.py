"""The training of the model that hears, with a rate that follows the clock."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import nn

from ops.training.hearing.model import (
    Batcher,
    Heads,
    build_extractor,
    build_model,
    build_tokenizer,
    loss_of,
)
from ops.training.hearing.samples import Sample, draw_sample
from ops.training.hearing.speech import Spoken
from ops.training.seeing.saving import save_half
from ops.training.seeing.scenes import console

WARM_UP_STEPS = 60
SAVE_EVERY_S = 240.0
TELL_EVERY_S = 30.0
HIDDEN_RATE, OTHER_RATE = 6e-3, 3e-3
LAST_RATE = 0.02
STATE_FILE = "training_state.json"
CLASSIFIER_WEIGHT = 0.5
# Weights that have been trained move less.
GO_ON_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    seed: int
    out: Path
    cpu_minutes: float
    """Time of the processor; the rate falls with it."""
    minutes: float
    """Time by the clock, which ends the training even so."""
    batch: int
    width: int
    layers: int
    first: Path | None = None
    """A folder whose weights and count of sounds the training goes on from."""


@dataclass(slots=True)
class State:
    cpu_s: float = 0.0
    elapsed_s: float = 0.0
    steps: int = 0
    samples: int = 0
    loss: float = float("nan")
    right: float = 0.0


class Trainer:
    """A model with its two optimizers: Muon for matrices between layers, AdamW for the rest."""

    def __init__(self, settings: Settings, bank: Sequence[Spoken]) -> None:
        torch.manual_seed(settings.seed)
        self._settings = settings
        self._bank = bank
        self._tokenizer = build_tokenizer()
        self._batcher = Batcher(self._tokenizer)
        self.model = build_model(self._tokenizer, settings.width, settings.layers)
        self._heads = Heads(settings.width)
        self.state = State()
        self._share, self._classifier_weight = 1.0, CLASSIFIER_WEIGHT
        if settings.first is not None:
            first = type(self.model).from_pretrained(settings.first, dtype=torch.float32)
            self.model.load_state_dict(first.state_dict())
            self.state = msgspec.json.decode((settings.first / STATE_FILE).read_bytes(), type=State)
            # A new classifier would disturb the tower.
            self._share, self._classifier_weight = GO_ON_SHARE, 0.0
        self.model.model.visual.requires_grad_(False)
        hidden: list[nn.Parameter] = []
        others = list(self._heads.parameters())
        for name, parameter in self.model.named_parameters():
            is_hidden = parameter.dim() == 2 and "embed" not in name
            if parameter.requires_grad:
                (hidden if is_hidden else others).append(parameter)
        muon = torch.optim.Muon(
            hidden, lr=HIDDEN_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimizers = [(muon, HIDDEN_RATE * self._share), (adam, OTHER_RATE * self._share)]

    def run(self) -> State:
        """Train until the processor time is over, and save the folder."""
        settings, state = self._settings, self.state
        rng = np.random.default_rng(settings.seed)
        before = replace(state)
        began_cpu_s, began_s = time.process_time(), time.monotonic()
        told = saved = state.cpu_s
        progress = 0.0
        self.model.train()
        while progress < 1:
            samples = [draw_sample(rng, self._bank) for _ in range(settings.batch)]
            warm = min(1.0, (state.steps - before.steps + 1) / WARM_UP_STEPS)
            self._step(samples, progress, warm)
            cpu_s, elapsed_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
            state.cpu_s, state.elapsed_s = before.cpu_s + cpu_s, before.elapsed_s + elapsed_s
            progress = max(cpu_s / (60 * settings.cpu_minutes), elapsed_s / (60 * settings.minutes))
            if state.cpu_s - told > TELL_EVERY_S:
                told = state.cpu_s
                console.log(told_of(state))
            if state.cpu_s - saved > SAVE_EVERY_S:
                saved = state.cpu_s
                self.save()
        self.save()
        console.log(f"ended: {told_of(state)}")
        return state

    def _step(self, samples: list[Sample], progress: float, warm: float) -> None:
        batch = self._batcher.collate(samples)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, told, right = loss_of(self.model, self._heads, batch, self._batcher.audio)
        self.model.zero_grad(set_to_none=True)
        self._heads.zero_grad(set_to_none=True)
        (loss + self._classifier_weight * (1 - progress) * told).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        state = self.state
        fall = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * warm * fall
            optimizer.step()
        state.steps += 1
        state.samples += len(samples)
        now = loss.item()
        state.loss = now if math.isnan(state.loss) else 0.97 * state.loss + 0.03 * now
        state.right = 0.97 * state.right + 0.03 * right

    def save(self) -> None:
        """Write a folder in the format of Hugging Face, with the weights in half precision."""
        save_half(self.model, self._tokenizer, self._settings.out)
        told = msgspec.json.format(msgspec.json.encode(asdict(self.state)), indent=1)
        (self._settings.out / STATE_FILE).write_bytes(told + b"\n")
        extractor = build_extractor().to_dict()
        images = json.loads(
            (Path(__file__).parents[2] / "demo_model/preprocessor_config.json").read_text()
        )
        text = json.dumps({**images, **extractor}, indent=2)
        (self._settings.out / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")


def told_of(state: State) -> str:
    return (
        f"{state.cpu_s / 60:.1f} min of CPU, step {state.steps}, {state.samples:,} sounds,"
        f" loss {state.loss:.3f}, tokens {state.right:.3f}, {state.samples / state.cpu_s:.0f}/s"
    )
