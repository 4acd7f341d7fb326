"""The two phases of training, with checkpoints and a rate that follows the processor's time."""

from __future__ import annotations

import json
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
from transformers import Qwen2VLForConditionalGeneration

from ops.training.seeing.batches import Batches, chat_batch, tower_batch
from ops.training.seeing.model import Heads, build_model, chat_loss, tower_loss
from ops.training.seeing.saving import save_checkpoint, save_folder
from ops.training.seeing.scenes import TRAIN_STREAM, console
from ops.training.seeing.tokenizer import Encoder, load_tokenizer


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
    first: Path | None = None
    """A folder whose weights the second phase begins with, in place of the first phase."""

    def phase_seconds(self, phase: int) -> float:
        share = self.tower_share if phase == 1 else 1 - self.tower_share
        return 60 * self.minutes * share


TOWER_RATE = 1.2e-3
TEXT_RATE = 1.5e-3
# Weights that have been trained move less.
GO_ON_SHARE = 0.3
WARM_UP_STEPS = 60
# The rate is constant up to the last part, so that a training can go on from any checkpoint.
FALL_SHARE = 0.5
LAST_RATE = 0.02
EMA = 0.998
SAVE_EVERY_S = 60.0
# A step that takes longer was interrupted; the interruption is no time of training.
LONGEST_STEP_S = 20.0


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


def processor_time() -> float:
    """Seconds in which the training computed, whatever else the machine did."""
    if torch.cuda.is_available():
        return time.monotonic()
    return time.process_time() / torch.get_num_threads()


class Trainer:
    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.first or settings.out)
        self.encoder = Encoder(self.tokenizer)
        model: Any = build_model(self.tokenizer)
        self.model = model.to(settings.device)
        self.heads = Heads(self.model.config.text_config.hidden_size).to(settings.device)
        self.state = State()
        self.optimizer: torch.optim.Optimizer | None = None
        self.kept: dict[str, Any] | None = None
        if settings.first is not None:
            self.state.phase = 2
            first = Qwen2VLForConditionalGeneration.from_pretrained(settings.first)
            self.model.load_state_dict({k: v.float() for k, v in first.state_dict().items()})
        self.average = {k: v.clone() for k, v in self.model.state_dict().items()}

    def load(self) -> None:
        kept = torch.load(self.settings.checkpoint, map_location=self.settings.device)
        self.model.load_state_dict(kept["model"])
        self.average = kept["average"]
        self.heads.load_state_dict(kept["heads"])
        self.state = State(**kept["state"])
        self.kept = kept["optimizer"]

    def save(self) -> None:
        assert self.optimizer is not None
        kept = {
            "model": self.model.state_dict(),
            "average": self.average,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
        }
        save_checkpoint(kept, self.settings.checkpoint)
        if self.state.phase == 2:
            save_folder(self.model, self.tokenizer, self.settings.out, self.average)
            self._note()

    def _note(self) -> None:
        """Writes what the card says about the training."""
        device = self.settings.device
        on_gpu = device.type == "cuda"
        machine = torch.cuda.get_device_name(device) if on_gpu else "CPU, without a GPU"
        names = ("tower alone", "tower and text together")
        phases = [
            f"{name}: {samples:,} conversations in {seconds / 60:.0f} minutes of the processor"
            for name, samples, seconds in zip(
                names, self.state.samples, self.state.seconds, strict=True
            )
            if samples
        ]
        start = "from the weights of the model before" if self.settings.first else "from nothing"
        note = {"machine": machine, "start": start, "phases": phases}
        text = json.dumps(note, indent=1) + "\n"
        (self.settings.out / "training.json").write_text(text, encoding="utf-8")

    def build_optimizer(self) -> torch.optim.Optimizer:
        visual = list(self.model.model.visual.parameters())
        if self.state.phase == 1:
            groups = [{"params": [*visual, *self.heads.parameters()], "peak": TOWER_RATE}]
        else:
            share = 1.0 if self.settings.first is None else GO_ON_SHARE
            text = [p for n, p in self.model.named_parameters() if "visual" not in n]
            groups = [
                {"params": text, "peak": TEXT_RATE * share},
                {"params": visual, "peak": TOWER_RATE * max(share, 0.4) / 2},
            ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        if self.kept is not None:
            peaks = [group["peak"] for group in groups]
            optimizer.load_state_dict(self.kept)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak"] = peak
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
            fall = LAST_RATE + (1 - LAST_RATE) * min(1.0, (1 - min(progress, 1.0)) / FALL_SHARE)
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
        self._follow()
        return loss.item(), right

    @torch.no_grad()
    def _follow(self) -> None:
        """Moves the average, which is what is saved, towards the weights."""
        share = 1 - min(EMA, self.state.steps / (self.state.steps + 10))
        now = self.model.state_dict()
        names = list(self.average)
        torch._foreach_lerp_(
            [self.average[name] for name in names], [now[name] for name in names], share
        )

    def phase(self) -> None:
        """Runs the present phase until its share of the time is over."""
        state, seconds = self.state, self.settings.phase_seconds(self.state.phase)
        self.optimizer = self.build_optimizer()
        self.model.train()
        if state.steps == 0:
            self.average = {k: v.clone() for k, v in self.model.state_dict().items()}
        progress = torch.multiprocessing.get_context("fork").Value("d", state.elapsed / seconds)
        batches = self.loader(progress)
        right: dict[str, float] = {}
        note, last = "", processor_time()
        saved = last
        with progress_bar() as bar:
            task = bar.add_task(f"phase {state.phase}", total=seconds, note="")
            while state.elapsed < seconds:
                batch = moved(next(batches), self.settings.device)
                loss, now_right = self.step(batch, state.elapsed / seconds)
                for name, value in now_right.items():
                    if not math.isnan(value):
                        right[name] = 0.98 * right.get(name, value) + 0.02 * value
                now = processor_time()
                taken = min(now - last, LONGEST_STEP_S)
                state.elapsed += taken
                state.seconds[state.phase - 1] += taken
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
