"""The training of the painter: its drawings, its loss and the average of its weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ops.training.painter.prompts import OTHER_WORDS_SHARE, Prompt, all_prompts, draw, other_words
from ops.training.painter.saving import PAD_ID, TOKENIZER, save_folder
from ops.training.seeing.scenes import Size
from ops.training.trainer import MuonTrainer, Rates
from workers.generator.painter import Painter, PainterShape, places_of, to_patches

SHAPE = PainterShape(width=128, depth=6, patch=6, num_tokens=768, max_text=16)
SIZE: Size = (24, 24)
OTHER_SIZES: tuple[Size, ...] = ((18, 18), (30, 24), (24, 30))
OTHER_SIZES_SHARE = 0.06
# So many prompts are left out, so that the network learns images without one.
DROPPED_SHARE = 0.1
# Until this part of the time all prompts are for one shape, then half of them.
SINGLE_PART = 0.15
SINGLE_SHARE = 0.5
# The rate is constant until this part of the time, and then falls.
FALL_FROM = 0.6
RATES = Rates(
    6e-3,
    3e-3,
    fall=lambda progress: min(1.0, (1 - progress) / (1 - FALL_FROM)),
    warm_up_steps=100,
    decay=0.01,
    beta=0.98,
)
EMA = 0.998
# The loss is that of the velocity, which grows without limit as the noise ends.
LEAST_NOISE = 0.2


@dataclass(slots=True)
class Settings:
    seed: int
    out: Path
    checkpoint: Path
    minutes: float
    batch: int


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a prompt, padded."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) <= SHAPE.max_text, text
    return ids + [PAD_ID] * (SHAPE.max_text - len(ids))


class Drawings:
    """Draws batches of one size: finished patches, and the tokens of their prompts."""

    def __init__(self, prompts: list[Prompt], batch: int, seed: str) -> None:
        self.batch = batch
        self.single = [prompt for prompt in prompts if prompt.count == 1]
        self.several = [prompt for prompt in prompts if prompt.count > 1]
        self.random = random.Random(seed)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.known: dict[str, list[int]] = {}

    def next(self, single_share: float) -> tuple[Size, Tensor, Tensor]:
        rng = self.random
        size = rng.choice(OTHER_SIZES) if rng.random() < OTHER_SIZES_SHARE else SIZE
        images, texts = [], []
        for _ in range(self.batch):
            prompt = rng.choice(self.single if rng.random() < single_share else self.several)
            images.append(np.asarray(draw(rng, prompt, size)))
            texts.append(self.tokens(self.words(prompt)))
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
        return size, to_patches(pixels.contiguous(), SHAPE.patch), torch.tensor(texts)

    def words(self, prompt: Prompt) -> str:
        if self.random.random() < OTHER_WORDS_SHARE:
            return other_words(self.random, prompt)
        return prompt.text

    def tokens(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = tokens_of(self.tokenizer, text)
        return self.known[text]


def build_network() -> Painter:
    network = Painter(SHAPE)
    # The network starts with gray images, and layers that add little.
    nn.init.zeros_(network.patch_out.weight)
    for name, parameter in network.named_parameters():
        if name.endswith(".out.weight"):
            nn.init.normal_(parameter, std=0.5 * SHAPE.width**-0.5)
        elif name.endswith(".down.weight"):
            nn.init.normal_(parameter, std=0.25 * SHAPE.width**-0.5)
    return network


class Trainer(MuonTrainer[tuple[Size, Tensor, Tensor]]):
    """A painter with a moving average of its weights, which is what is saved."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        network = build_network()
        super().__init__(network, _is_hidden, RATES, settings.minutes, settings.checkpoint)
        self.settings = settings
        self.average = {name: value.clone() for name, value in network.state_dict().items()}
        self.drawings: Drawings | None = None
        self.places: dict[Size, Tensor] = {}
        for width, height in (SIZE, *OTHER_SIZES):
            rows, columns = height // SHAPE.patch, width // SHAPE.patch
            self.places[width, height] = places_of(rows, columns).float()

    def kept(self) -> dict[str, Any]:
        return {**super().kept(), "average": self.average}

    def load(self) -> dict[str, Any]:
        kept = super().load()
        self.average = kept["average"]
        return kept

    def save_result(self) -> None:
        save_folder(self.average, SHAPE, self.settings.out)

    def draw(self) -> tuple[Size, Tensor, Tensor]:
        settings, state = self.settings, self.state
        if self.drawings is None:
            prompts = [prompt for prompt in all_prompts() if not prompt.is_held_out]
            stream = f"{settings.seed}/train/{state.steps}"
            self.drawings = Drawings(prompts, settings.batch, stream)
        size, images, text = self.drawings.next(
            1.0 if self.progress < SINGLE_PART else SINGLE_SHARE
        )
        state.samples += len(images)
        state.tokens += images[..., 0].numel() + text.numel()
        return size, images, text

    def loss(self, batch: tuple[Size, Tensor, Tensor]) -> Tensor:
        size, images, text = batch
        count = len(images)
        text = torch.where(torch.rand(count, 1) < DROPPED_SHARE, PAD_ID, text)
        times = torch.sigmoid(torch.randn(count) - 0.4)
        noisy = torch.lerp(torch.randn_like(images), images, times[:, None, None])
        # Matrices in half precision are fast, but not the backward pass of torch's fused attention.
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            painted: Tensor = self.network(noisy, times, text, self.places[size])
        left = (1 - times).clamp(min=LEAST_NOISE)[:, None, None]
        return (((painted.float() - images) / left) ** 2).mean()

    def step(self, batch: tuple[Size, Tensor, Tensor]) -> float:
        loss = super().step(batch)
        decay = min(EMA, (self.state.steps + 1) / (self.state.steps + 20))
        for name, value in self.network.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)
        return loss


def _is_hidden(name: str, _: nn.Parameter) -> bool:
    return name.startswith("layers") and name.endswith("weight")
