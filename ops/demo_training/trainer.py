"""The two phases of training, with checkpoints and a rate that follows the clock."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ops.demo_training.batches import Batches, chat_batch, tower_batch
from ops.demo_training.model import Heads, build_model, chat_loss, tower_loss
from ops.demo_training.saving import save_folder
from ops.demo_training.scenes import TRAIN_STREAM, console
from ops.demo_training.tokenizer import Encoder, build_tokenizer


@dataclass(slots=True)
class State:
    """How far the training is; kept in the checkpoint."""

    phase: int = 1
    elapsed: float = 0.0
    steps: int = 0
    samples: list[int] = field(default_factory=lambda: [0, 0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass(slots=True)
class Settings:
    device: torch.device
    seed: int
    out: Path
    checkpoint: Path
    minutes: float
    tower_share: float
    workers: int
    batch: int

    def phase_seconds(self, phase: int) -> float:
        share = self.tower_share if phase == 1 else 1 - self.tower_share
        return 60 * self.minutes * share


TOWER_RATE = 1.2e-3
TEXT_RATE = 1.5e-3
WARM_UP_STEPS = 60
SAVE_EVERY_S = 120.0


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on the device; a plain tuple walk, since the batches are small dataclasses."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, int):
        return batch
    if isinstance(batch, list):
        return [moved(item, device) for item in batch]
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    names = batch.__dataclass_fields__
    return type(batch)(**{name: moved(getattr(batch, name), device) for name in names})


class Trainer:
    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.tokenizer = build_tokenizer(settings.seed)
        self.encoder = Encoder(self.tokenizer)
        model: Any = build_model(self.tokenizer)
        self.model = model.to(settings.device)
        self.heads = Heads(self.model.config.text_config.hidden_size).to(settings.device)
        self.state = State()
        self.optimizer: torch.optim.Optimizer | None = None
        self.kept: dict[str, Any] | None = None

    def load(self) -> None:
        kept = torch.load(self.settings.checkpoint, map_location=self.settings.device)
        self.model.load_state_dict(kept["model"])
        self.heads.load_state_dict(kept["heads"])
        self.state = State(**kept["state"])
        self.kept = kept["optimizer"]

    def save(self) -> None:
        assert self.optimizer is not None
        kept = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
        }
        # Written beside and renamed, so that a stop in the middle leaves the former one whole.
        part = self.settings.checkpoint.with_suffix(".part")
        torch.save(kept, part)
        part.replace(self.settings.checkpoint)
        if self.state.phase == 2:
            save_folder(self.model, self.tokenizer, self.settings.out)

    def build_optimizer(self) -> torch.optim.Optimizer:
        visual = list(self.model.model.visual.parameters())
        if self.state.phase == 1:
            groups = [{"params": [*visual, *self.heads.parameters()], "peak": TOWER_RATE}]
        else:
            text = [p for n, p in self.model.named_parameters() if "visual" not in n]
            groups = [
                {"params": text, "peak": TEXT_RATE},
                {"params": visual, "peak": TOWER_RATE / 5},
            ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        if self.kept is not None:
            optimizer.load_state_dict(self.kept)
            self.kept = None
        return optimizer

    @property
    def batch_size(self) -> int:
        """Samples a step; a tower alone needs larger batches to keep a processor busy."""
        return self.settings.batch * (2 if self.state.phase == 1 else 1)

    def loader(self, progress: Synchronized[float]) -> Iterator[Any]:
        # Plain names: the loader's processes must not take the model along.
        size, encoder = self.batch_size, self.encoder

        def make(rng: random.Random, at: float) -> Any:
            return tower_batch(rng, size, at) if phase == 1 else chat_batch(rng, size, encoder)

        phase = self.state.phase
        stream = f"{self.settings.seed}/{TRAIN_STREAM}/{phase}/{self.state.steps}"
        loader = DataLoader(
            Batches(make, stream, progress),
            batch_size=None,
            num_workers=self.settings.workers,
            prefetch_factor=4,
            multiprocessing_context="fork",
        )
        return iter(loader)

    def step(self, batch: Any, progress: float) -> tuple[float, dict[str, float]]:
        assert self.optimizer is not None
        warm = min(1.0, (self.state.steps + 1) / WARM_UP_STEPS)
        for group in self.optimizer.param_groups:
            fall = 0.03 + 0.97 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
            group["lr"] = group["peak"] * warm * fall
        with torch.autocast(self.settings.device.type, dtype=torch.bfloat16):
            if self.state.phase == 1:
                loss, right = tower_loss(self.model.model.visual, self.heads, batch)
            else:
                loss, right = chat_loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.optimizer.step()
        return loss.item(), right

    def phase(self) -> None:
        """Runs the present phase until its share of the time is over."""
        state, seconds = self.state, self.settings.phase_seconds(self.state.phase)
        self.optimizer = self.build_optimizer()
        self.model.train()
        progress = torch.multiprocessing.get_context("fork").Value("d", state.elapsed / seconds)
        batches = self.loader(progress)
        right: dict[str, float] = {}
        note, last = "", time.monotonic()
        saved = last
        with progress_bar() as bar:
            task = bar.add_task(f"phase {state.phase}", total=seconds, note="")
            while state.elapsed < seconds:
                batch = moved(next(batches), self.settings.device)
                loss, now_right = self.step(batch, state.elapsed / seconds)
                for name, value in now_right.items():
                    if not math.isnan(value):
                        right[name] = 0.98 * right.get(name, value) + 0.02 * value
                now = time.monotonic()
                state.elapsed += now - last
                state.seconds[state.phase - 1] += now - last
                last = now
                state.steps += 1
                state.samples[state.phase - 1] += self.batch_size
                progress.value = state.elapsed / seconds
                speed = state.samples[state.phase - 1] / state.seconds[state.phase - 1]
                shown = " ".join(f"{name} {value:.3f}" for name, value in right.items())
                note = f"loss {loss:.3f} {shown} {speed:.0f}/s"
                bar.update(task, completed=state.elapsed, note=note)
                if now - saved > SAVE_EVERY_S:
                    self.save()
                    console.log(f"phase {state.phase} step {state.steps}: {note}")
                    saved = now
        console.log(f"phase {state.phase} ended at step {state.steps}: {note}")

    def run(self) -> None:
        while self.state.phase <= 2:
            self.phase()
            self.save()
            self.state.phase += 1
            self.state.elapsed, self.state.steps = 0.0, 0


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
