"""Training with Muon for a time of the CPU, with checkpoints: of the demo's voice and painter."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ops.training.seeing.saving import save_checkpoint
from ops.training.seeing.scenes import console

Batch = TypeVar("Batch")
SAVE_EVERY_S = 120.0
TELL_EVERY_S = 30.0


@dataclass(slots=True)
class MuonState:
    """How far the training is; kept in the checkpoint."""

    cpu: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    loss: float = float("nan")


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates and what belongs to them."""

    hidden: float
    others: float
    fall: Callable[[float], float]
    """The part of the rates at a progress from 0 to 1."""
    warm_up_steps: int
    decay: float
    """Weight decay of the hidden matrices."""
    beta: float
    """AdamW's second one."""


class MuonTrainer(ABC, Generic[Batch]):
    """A network with its two optimizers: Muon for matrices of the layers, AdamW for the rest.

    Time is that of the CPU, so that a process that waits or is stopped loses nothing.
    """

    def __init__(
        self,
        network: nn.Module,
        is_hidden: Callable[[str, nn.Parameter], bool],
        rates: Rates,
        minutes: float,
        checkpoint: Path,
    ) -> None:
        self.network, self.rates, self.checkpoint = network, rates, checkpoint
        self.seconds = 60 * minutes
        named = list(network.named_parameters())
        hidden = [parameter for name, parameter in named if is_hidden(name, parameter)]
        others = [parameter for name, parameter in named if not is_hidden(name, parameter)]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.Muon(
                    hidden, rates.hidden, weight_decay=rates.decay, adjust_lr_fn="match_rms_adamw"
                ),
                rates.hidden,
            ),
            (
                torch.optim.AdamW(others, rates.others, betas=(0.9, rates.beta), weight_decay=0.0),
                rates.others,
            ),
        ]
        self.state = MuonState()

    @abstractmethod
    def draw(self) -> Batch:
        """The next batch; it is counted in `state`."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor: ...

    @abstractmethod
    def save_result(self) -> None:
        """Write what the product loads."""

    @property
    def progress(self) -> float:
        return self.state.cpu / self.seconds

    def kept(self) -> dict[str, Any]:
        """What the checkpoint has."""
        return {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "state": asdict(self.state),
        }

    def load(self) -> dict[str, Any]:
        kept: dict[str, Any] = torch.load(self.checkpoint)
        self.network.load_state_dict(kept["network"])
        self.state = MuonState(**kept["state"])
        for (optimizer, _), state in zip(self.optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        return kept

    def save(self) -> None:
        save_checkpoint(self.kept(), self.checkpoint)
        self.save_result()

    def step(self, batch: Batch) -> float:
        warm = min(1.0, (self.state.steps + 1) / self.rates.warm_up_steps)
        part = warm * self.rates.fall(min(self.progress, 1.0))
        loss = self.loss(batch)
        self.network.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * part
            optimizer.step()
        return loss.item()

    def run(self) -> None:
        """Trains until the time is over."""
        state = self.state
        parameters = sum(parameter.numel() for parameter in self.network.parameters())
        console.log(f"{parameters:,} parameters")
        self.network.train()
        start = time.process_time() - state.cpu
        saved = told = state.cpu
        while self.progress < 1:
            loss = self.step(self.draw())
            state.loss = loss if math.isnan(state.loss) else 0.98 * state.loss + 0.02 * loss
            state.steps += 1
            state.cpu = time.process_time() - start
            if state.cpu - told > TELL_EVERY_S:
                console.log(told_of(state))
                told = state.cpu
            if state.cpu - saved > SAVE_EVERY_S:
                self.save()
                saved = state.cpu
        self.save()
        console.log(f"ended: {told_of(state)}")


def told_of(state: MuonState) -> str:
    return (
        f"{state.cpu / 60:.1f} min of CPU, step {state.steps}, {state.samples:,} samples, "
        f"loss {state.loss:.4f}, {state.samples / state.cpu:.0f} samples/s, "
        f"{state.tokens / state.cpu:.0f} tokens/s"
    )


def cosine(last: float) -> Callable[[float], float]:
    """A rate that falls from 1 to `last` along half a wave."""
    return lambda progress: last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2
