"""The training of the painter, with checkpoints and a rate that follows the clock."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from ops.demo_painter.training.prompts import (
    OTHER_WORDS_SHARE,
    Prompt,
    all_prompts,
    draw,
    other_words,
)
from ops.demo_painter.training.saving import PAD_ID, TOKENIZER, save_folder
from ops.demo_training.scenes import Size, console
from workers.generator.painter import Painter, PainterShape, places_of, to_patches

SHAPE = PainterShape(width=128, depth=6, patch=6, num_tokens=768, max_text=16)
SIZE: Size = (30, 30)
OTHER_SIZES: tuple[Size, ...] = ((24, 24), (36, 30), (30, 36))
OTHER_SIZES_SHARE = 0.06
# So many prompts are left out, so that the network learns images without one.
DROPPED_SHARE = 0.1
# A prompt for one shape is drawn so many times as often as one for several: half of all.
SINGLE_WEIGHT = 4.0
WARM_UP_STEPS = 100
SAVE_EVERY_S = 120.0
TELL_EVERY_S = 30.0
# A step that takes longer was interrupted; the interruption is no time of training.
LONGEST_STEP_S = 10.0
HIDDEN_RATE, OTHER_RATE = 6e-3, 3e-3
LAST_RATE = 0.01
EMA = 0.998
# The loss is that of the velocity, which grows without limit as the noise ends.
LEAST_NOISE = 0.05


@dataclass(slots=True)
class State:
    """How far the training is; kept in the checkpoint."""

    elapsed: float = 0.0
    cpu: float = 0.0
    steps: int = 0
    images: int = 0
    loss: float = float("nan")


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
        self.prompts, self.batch = prompts, batch
        self.weights = [1.0 if prompt.count > 1 else SINGLE_WEIGHT for prompt in prompts]
        self.random = random.Random(seed)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.known: dict[str, list[int]] = {}

    def next(self) -> tuple[Size, Tensor, Tensor]:
        rng = self.random
        size = rng.choice(OTHER_SIZES) if rng.random() < OTHER_SIZES_SHARE else SIZE
        images, texts = [], []
        for prompt in rng.choices(self.prompts, self.weights, k=self.batch):
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


class Trainer:
    """A network with its two optimizers: Muon for matrices of the layers, AdamW for the rest."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.network = build_network()
        self.average = {name: value.clone() for name, value in self.network.state_dict().items()}
        hidden: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.network.named_parameters():
            is_hidden = name.startswith("layers") and name.endswith("weight")
            (hidden if is_hidden else others).append(parameter)
        muon = torch.optim.Muon(
            hidden, lr=HIDDEN_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (muon, HIDDEN_RATE),
            (adam, OTHER_RATE),
        ]
        self.state = State()
        self.places: dict[Size, Tensor] = {}
        for width, height in (SIZE, *OTHER_SIZES):
            rows, columns = height // SHAPE.patch, width // SHAPE.patch
            self.places[width, height] = places_of(rows, columns).float()

    def load(self) -> None:
        kept = torch.load(self.settings.checkpoint)
        self.network.load_state_dict(kept["network"])
        self.average = kept["average"]
        self.state = State(**kept["state"])
        for (optimizer, _), state in zip(self.optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> None:
        kept = {
            "network": self.network.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "state": asdict(self.state),
        }
        # Written beside and renamed, so that a stop in the middle leaves the former one whole.
        part = self.settings.checkpoint.with_suffix(".part")
        torch.save(kept, part)
        part.replace(self.settings.checkpoint)
        save_folder(self.average, SHAPE, self.settings.out)

    def loss(self, size: Size, images: Tensor, text: Tensor) -> Tensor:
        count = len(images)
        text = torch.where(torch.rand(count, 1) < DROPPED_SHARE, PAD_ID, text)
        times = torch.sigmoid(torch.randn(count) - 0.4)
        noisy = torch.lerp(torch.randn_like(images), images, times[:, None, None])
        painted: Tensor = self.network(noisy, times, text, self.places[size])
        left = (1 - times).clamp(min=LEAST_NOISE)[:, None, None]
        return (((painted - images) / left) ** 2).mean()

    def step(self, batch: tuple[Size, Tensor, Tensor], progress: float) -> float:
        warm = min(1.0, (self.state.steps + 1) / WARM_UP_STEPS)
        fall = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        loss = self.loss(*batch)
        self.network.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * warm * fall
            optimizer.step()
        decay = min(EMA, (self.state.steps + 1) / (self.state.steps + 20))
        for name, value in self.network.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)
        return loss.item()

    def run(self) -> None:
        """Trains until the time is over."""
        settings, state = self.settings, self.state
        prompts = [prompt for prompt in all_prompts() if not prompt.is_held_out]
        drawings = Drawings(prompts, settings.batch, f"{settings.seed}/train/{state.steps}")
        parameters = sum(parameter.numel() for parameter in self.network.parameters())
        console.log(f"{parameters:,} parameters, {len(prompts):,} prompts")
        cpu = time.process_time() - state.cpu
        last = saved = told = time.monotonic()
        while state.elapsed < 60 * settings.minutes:
            batch = drawings.next()
            loss = self.step(batch, state.elapsed / (60 * settings.minutes))
            state.loss = loss if math.isnan(state.loss) else 0.98 * state.loss + 0.02 * loss
            now = time.monotonic()
            state.elapsed += min(now - last, LONGEST_STEP_S)
            state.cpu = time.process_time() - cpu
            last = now
            state.steps += 1
            state.images += settings.batch
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
        f"{state.images:,} images, loss {state.loss:.4f}, {state.images / state.cpu:.0f} images/s"
    )
