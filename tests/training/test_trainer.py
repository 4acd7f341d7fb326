"""The trainer of the demo models, with a task of two numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ops.training.card import Score, verdict
from ops.training.trainer import Settings, State, Task, Trainer, late_fall, stored_state


@dataclass
class Numbers:
    values: Tensor
    num_samples: int = 4
    num_tokens: int = 8


class Line(Task[Numbers]):
    """Learns y = 2 x."""

    warm_up_steps = 2
    average_decay = 0.9

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = self.line = nn.Linear(1, 1)
        self.optimizers = [torch.optim.SGD(self.line.parameters(), lr=0.1)]
        self.saved: list[tuple[dict[str, Tensor], State]] = []

    def fall(self, progress: float) -> float:
        return late_fall(progress, share=0.5)

    def draw(self, steps: int, progress: Synchronized[float]) -> Iterator[Numbers]:
        generator = torch.Generator().manual_seed(steps)
        while True:
            yield Numbers(torch.rand(4, 1, generator=generator))

    def loss(self, batch: Numbers, progress: float) -> tuple[Tensor, dict[str, float]]:
        loss = (self.network(batch.values) - 2 * batch.values).square().mean()
        return loss, {"known": 1.0, "unknown": float("nan")}

    def save(self, weights: Mapping[str, Tensor], state: State) -> None:
        self.saved.append((dict(weights), state))


def rate(task: Line) -> float:
    return float(task.optimizers[0].param_groups[0]["lr"])


def test_rates_rise_at_first_and_fall_in_the_last_part(tmp_path: Path) -> None:
    task = Line()
    trainer = Trainer(task, Settings(1.0, tmp_path / "checkpoint.pt"))
    batches, rates = task.draw(0, trainer.progress), []
    for trainer.progress.value in (0.0, 0.3, 0.5, 0.75, 1.0):
        trainer.step(next(batches))
        rates.append(rate(task))
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.0])


def test_a_training_ends_with_its_time_and_saves_the_average(tmp_path: Path) -> None:
    task = Line()
    state = Trainer(task, Settings(0.01, tmp_path / "checkpoint.pt")).run()
    assert state.cpu_s >= 0.6
    assert state.samples == 4 * state.steps
    assert state.figures["known"] == 1.0
    weights, _ = task.saved[-1]
    assert weights["weight"].item() == pytest.approx(task.line.weight.item(), abs=0.1)
    assert not torch.equal(weights["weight"], task.line.weight)


def test_a_training_continues_from_its_checkpoint_as_if_never_interrupted(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    assert stored_state(file) is None
    trainer = Trainer(Line(), Settings(1.0, file))
    batch = Numbers(torch.rand(4, 1))
    for _ in range(3):
        trainer.step(batch)
    trainer.save()
    resumed = Trainer(Line(), Settings(1.0, file))
    resumed.load()
    assert resumed.state.steps == 3
    assert [trainer.step(batch) for _ in range(3)] == [resumed.step(batch) for _ in range(3)]


def test_a_card_names_the_goals_that_were_missed() -> None:
    scores = [Score("digits", 90.0), Score("letters", 40.0), Score("others")]
    for score in scores:
        score.add("a", "a")
        score.add("b", "c")
    assert scores[0].row == "| digits | 1 of 2 | 50.0 % | 90 % |"
    assert scores[2].mistakes == [("b", "c")]
    assert verdict(scores) == "Below the goal: digits."
    assert verdict(scores[1:]) == "All goals are reached."
