"""Training loop of all demo models: rates, average of the weights, checkpoints and log."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn

from ops.training.saving import save_checkpoint

console = Console()

SAVE_EVERY_S = 120.0
LOG_EVERY_S = 30.0
# A longer step was interrupted. The interruption does not count as time of training.
LONGEST_STEP_S = 20.0


class Batch(Protocol):
    @property
    def num_samples(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


B = TypeVar("B", bound=Batch)


@dataclass(slots=True)
class State:
    """Progress of a training; part of the checkpoint."""

    cpu_s: float = 0.0
    elapsed_s: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    loss: float = float("nan")
    figures: dict[str, float] = field(default_factory=dict)
    """Running means of other figures that the task measures."""

    def __str__(self) -> str:
        figures = "".join(f", {name} {value:.3f}" for name, value in self.figures.items())
        seconds = max(self.cpu_s, 1e-3)
        return (
            f"{self.cpu_s / 60:.1f} min of CPU, step {self.steps}, {self.samples:,} samples, "
            f"loss {self.loss:.4f}{figures}, {self.samples / seconds:.0f} samples/s, "
            f"{self.tokens / seconds:.0f} tokens/s"
        )


class Task(ABC, Generic[B]):
    """Everything that differs between the trainings.

    The first rates of the optimizers are their highest: the trainer lowers them by `warm_up_steps`
    and `fall`.
    """

    network: nn.Module
    optimizers: list[torch.optim.Optimizer]
    warm_up_steps = 60
    average_decay = 0.0
    """Decay of the moving average of the weights, which is saved; 0 saves the weights themselves"""

    @abstractmethod
    def fall(self, progress: float) -> float:
        """Return the part of the highest rates at a progress from 0 to 1."""

    @abstractmethod
    def draw(self, steps: int, progress: Synchronized[float]) -> Iterator[B]:
        """Yield batches without end, from the stream of random numbers of this step."""

    @abstractmethod
    def loss(self, batch: B, progress: float) -> tuple[Tensor, dict[str, float]]:
        """Return the loss and figures for the log; NaN is a figure that the batch does not have."""

    @abstractmethod
    def save(self, weights: Mapping[str, Tensor], state: State) -> None:
        """Write the folder that the product loads."""

    def clipped(self) -> Iterable[list[nn.Parameter]]:
        """Return groups of parameters. The gradients of each are clipped to a norm of 1."""
        return [list(self.network.parameters())]


@dataclass(frozen=True, slots=True)
class Settings:
    minutes: float
    """Time of the processor, which the rates follow."""
    checkpoint: Path
    clock_minutes: float = math.inf
    """Time by the clock, which also ends the training."""


class Trainer(Generic[B]):
    """Trains a task until its time is over.

    Time is the processor's, so that a process that waits or is stopped loses nothing, and the rates
    reach their end on any machine. A training is therefore seeded, but not reproducible to the bit.
    """

    def __init__(self, task: Task[B], settings: Settings) -> None:
        self.task, self.settings, self.state = task, settings, State()
        self._peaks = [[group["lr"] for group in opt.param_groups] for opt in task.optimizers]
        self._average: dict[str, Tensor] | None = None
        if task.average_decay:
            self._average = {k: v.clone() for k, v in task.network.state_dict().items()}
        # Shared with the processes that draw batches.
        self.progress: Synchronized[float] = torch.multiprocessing.get_context("fork").Value("d", 0)

    def load(self) -> None:
        """Continue from the checkpoint."""
        stored = torch.load(self.settings.checkpoint)
        self.task.network.load_state_dict(stored["network"])
        self._average = stored["average"]
        self.state = State(**stored["state"])
        for optimizer, state in zip(self.task.optimizers, stored["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> None:
        network = self.task.network.state_dict()
        checkpoint: dict[str, Any] = {
            "network": network,
            "average": self._average,
            "optimizers": [optimizer.state_dict() for optimizer in self.task.optimizers],
            "state": asdict(self.state),
        }
        save_checkpoint(checkpoint, self.settings.checkpoint)
        self.task.save(self._average or network, self.state)

    def step(self, batch: B) -> float:
        """Train on a batch and return its loss."""
        task, progress = self.task, self.progress.value
        warm = min(1.0, (self.state.steps + 1) / task.warm_up_steps)
        part = warm * task.fall(min(progress, 1.0))
        for optimizer, peaks in zip(task.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * part
        loss, figures = task.loss(batch, progress)
        task.network.zero_grad(set_to_none=True)
        loss.backward()
        for parameters in task.clipped():
            nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in task.optimizers:
            optimizer.step()
        self._update_average()
        self._count(batch, loss.item(), figures)
        return loss.item()

    def run(self, resume: bool = False) -> State:
        """Train until the time is over, perhaps from the checkpoint, and save."""
        if resume:
            self.load()
        task, state = self.task, self.state
        console.log(f"{sum(p.numel() for p in task.network.parameters()):,} parameters")
        task.network.train()
        last_cpu_s, last_s = processor_s(), time.monotonic()
        logged_s = saved_s = state.cpu_s
        self._set_progress()
        batches = task.draw(state.steps, self.progress)
        while self.progress.value < 1:
            self.step(next(batches))
            cpu_s, now_s = processor_s(), time.monotonic()
            state.cpu_s += min(cpu_s - last_cpu_s, LONGEST_STEP_S)
            state.elapsed_s += now_s - last_s
            last_cpu_s, last_s = cpu_s, now_s
            self._set_progress()
            if state.cpu_s - logged_s > LOG_EVERY_S:
                console.log(str(state))
                logged_s = state.cpu_s
            if state.cpu_s - saved_s > SAVE_EVERY_S:
                self.save()
                saved_s = state.cpu_s
        self.save()
        console.log(f"ended: {state}")
        return state

    def _set_progress(self) -> None:
        settings, state = self.settings, self.state
        cpu, clock = state.cpu_s / settings.minutes, state.elapsed_s / settings.clock_minutes
        self.progress.value = max(cpu, clock) / 60

    @torch.no_grad()
    def _update_average(self) -> None:
        if self._average is None:
            return
        # The average of the first steps is short, so that it soon forgets the initial weights.
        decay = min(self.task.average_decay, self.state.steps / (self.state.steps + 10))
        weights = self.task.network.state_dict()
        names = list(self._average)
        torch._foreach_lerp_(
            [self._average[name] for name in names], [weights[name] for name in names], 1 - decay
        )

    def _count(self, batch: B, loss: float, figures: Mapping[str, float]) -> None:
        state = self.state
        state.steps += 1
        state.samples += batch.num_samples
        state.tokens += batch.num_tokens
        state.loss = _running(state.loss, loss)
        for name, value in figures.items():
            state.figures[name] = _running(state.figures.get(name, math.nan), value)


def _running(mean: float, value: float) -> float:
    if math.isnan(value):
        return mean
    return value if math.isnan(mean) else 0.98 * mean + 0.02 * value


def processor_s() -> float:
    """Return the processor seconds of this process; with a GPU, the seconds of the clock."""
    if torch.cuda.is_available():
        return time.monotonic()
    return time.process_time() / torch.get_num_threads()


def muon_and_adamw(
    hidden: list[nn.Parameter],
    others: list[nn.Parameter],
    rates: tuple[float, float],
    decay: float,
    beta: float,
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of hidden layers, with weight decay, and AdamW for the rest."""
    hidden_rate, other_rate = rates
    return [
        torch.optim.Muon(hidden, hidden_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, other_rate, betas=(0.9, beta), weight_decay=0.0),
    ]


def divided(
    network: nn.Module, is_hidden: Callable[[str, nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters of hidden layers, and the others."""
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            (hidden if is_hidden(name, parameter) else others).append(parameter)
    return hidden, others


def cosine(progress: float, last: float = 0.02) -> float:
    """Return a rate that falls from 1 to `last` along half a wave."""
    return last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2


def late_fall(progress: float, share: float, last: float = 0.0) -> float:
    """Return a rate that is 1 and falls to `last` in the last `share` of the time.

    A training with such a rate can continue from any checkpoint with more time.
    """
    return last + (1 - last) * min(1.0, (1 - progress) / share)


def init_normal(network: nn.Module, residual: tuple[str, ...]) -> None:
    """Initialize weights by the width of their layer, and those that end in `residual` by half.

    The 0.02 of transformers is meant for wide layers: in narrow ones, attention would learn nothing
    in the first hundred thousand samples.
    """
    for name, weight in network.named_parameters():
        if weight.dim() > 1:
            scale = 0.5 if name.endswith(residual) else 1.0
            nn.init.normal_(weight, std=scale * weight[0].numel() ** -0.5)


def stored_state(checkpoint: Path) -> State | None:
    """Return the state of a training, or None if its checkpoint is not on this machine."""
    return State(**torch.load(checkpoint)["state"]) if checkpoint.exists() else None
