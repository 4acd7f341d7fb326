"""Training of the model that hears."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from ops.training.folders import SEEING
from ops.training.hearing.model import (
    Batch,
    Batcher,
    Heads,
    build_extractor,
    build_model,
    build_tokenizer,
    loss_of,
)
from ops.training.hearing.samples import draw_sample
from ops.training.hearing.speech import Spoken
from ops.training.saving import save_half, save_json
from ops.training.trainer import State, Task, cosine, divided, muon_and_adamw

STATE_FILE = "training_state.json"
RATES = (6e-3, 3e-3)
CLASSIFIER_WEIGHT = 0.5
# Part of the rates for weights that have been trained before.
CONTINUED_SHARE = 0.5


def load_state(folder: Path) -> State:
    return msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=State)


class Hearing(Task[Batch]):
    """A model and a classifier, which helps the audio tower at the beginning.

    `first` is the folder of a model to continue from. The new state includes its samples and times.
    """

    def __init__(
        self,
        bank: Sequence[Spoken],
        out: Path,
        seed: int,
        batch: int,
        width: int,
        layers: int,
        first: Path | None,
    ) -> None:
        torch.manual_seed(seed)
        self.bank, self.out, self.seed, self.batch = bank, out, seed, batch
        self.tokenizer = build_tokenizer()
        self.batcher = Batcher(self.tokenizer)
        self.model = build_model(self.tokenizer, width, layers)
        self.heads = Heads(width)
        self.earlier, share, self.classifier_weight = State(), 1.0, CLASSIFIER_WEIGHT
        if first is not None:
            earlier = type(self.model).from_pretrained(first, dtype=torch.float32)
            self.model.load_state_dict(earlier.state_dict())
            self.earlier, share = load_state(first), CONTINUED_SHARE
            # A new classifier would disturb the tower.
            self.classifier_weight = 0.0
        self.model.model.visual.requires_grad_(False)
        self.network = nn.ModuleDict({"model": self.model, "heads": self.heads})
        hidden, others = divided(self.model, lambda name, p: p.dim() == 2 and "embed" not in name)
        others += self.heads.parameters()
        rates = RATES[0] * share, RATES[1] * share
        self.optimizers = muon_and_adamw(hidden, others, rates, decay=0.02, beta=0.95)

    def clipped(self) -> list[list[nn.Parameter]]:
        return [list(self.model.parameters())]

    def fall(self, progress: float) -> float:
        return cosine(progress)

    def draw(self, steps: int, progress: Synchronized[float]) -> Iterator[Batch]:
        rng = np.random.default_rng([self.seed, steps])
        while True:
            yield self.batcher.collate([draw_sample(rng, self.bank) for _ in range(self.batch)])

    def loss(self, batch: Batch, progress: float) -> tuple[Tensor, dict[str, float]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, class_loss, right = loss_of(self.model, self.heads, batch, self.batcher.audio)
        figures = {"answers": loss.item(), "tokens": right}
        return loss + self.classifier_weight * (1 - progress) * class_loss, figures

    def save(self, weights: Mapping[str, Tensor], state: State) -> None:
        """Write a folder in the format of Hugging Face, with the weights in half precision."""
        save_half(self.model, self.tokenizer, self.out)
        earlier = self.earlier
        total = replace(
            state,
            cpu_s=earlier.cpu_s + state.cpu_s,
            elapsed_s=earlier.elapsed_s + state.elapsed_s,
            steps=earlier.steps + state.steps,
            samples=earlier.samples + state.samples,
            tokens=earlier.tokens + state.tokens,
        )
        save_json(self.out / STATE_FILE, asdict(total))
        images = json.loads((SEEING / "preprocessor_config.json").read_text(encoding="utf-8"))
        save_json(self.out / "preprocessor_config.json", images | build_extractor().to_dict())
