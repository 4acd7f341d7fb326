"""Training of the painter on drawings."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ops.training.folders import SEEING
from ops.training.painter.prompts import OTHER_WORDS_SHARE, Prompt, all_prompts, draw, other_words
from ops.training.seeing.scenes import Size
from ops.training.trainer import State, Task, divided, late_fall, muon_and_adamw
from workers.generator.painter import Painter, PainterShape, places_of, to_patches
from workers.generator.painter_model import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, PainterConfig

TOKENIZER = SEEING / TOKENIZER_FILE
# The tokenizer's <|endoftext|>, which no prompt has.
PAD_ID = 754
SCALE = 5
SHAPE = PainterShape(width=128, depth=6, patch=6, num_tokens=768, max_text=16)
SIZE: Size = (24, 24)
OTHER_SIZES: tuple[Size, ...] = ((18, 18), (30, 24), (24, 30))
OTHER_SIZES_SHARE = 0.06
# Share of the prompts that are left out, so that the network learns images without one.
DROPPED_SHARE = 0.1
# Until this part of the time all prompts are for one shape, then half of them.
SINGLE_PART = 0.15
SINGLE_SHARE = 0.5
# The rate is constant, and falls in the last part of the time.
FALL_SHARE = 0.4
# The loss is the loss of the velocity, which would grow without limit as the noise ends.
LEAST_NOISE = 0.2


@dataclass(frozen=True, slots=True)
class Batch:
    """Finished patches of one size, and the tokens of their prompts."""

    size: Size
    images: Tensor
    text: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.images)

    @property
    def num_tokens(self) -> int:
        return self.images[..., 0].numel() + self.text.numel()


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a prompt, padded."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) <= SHAPE.max_text, text
    return ids + [PAD_ID] * (SHAPE.max_text - len(ids))


class Drawings:
    """Draws batches of drawings and prompts."""

    def __init__(self, prompts: list[Prompt], batch: int, seed: str) -> None:
        self.batch = batch
        self.single = [prompt for prompt in prompts if prompt.count == 1]
        self.several = [prompt for prompt in prompts if prompt.count > 1]
        self.random = random.Random(seed)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.known: dict[str, list[int]] = {}

    def next(self, single_share: float) -> Batch:
        rng = self.random
        size = rng.choice(OTHER_SIZES) if rng.random() < OTHER_SIZES_SHARE else SIZE
        images, texts = [], []
        for _ in range(self.batch):
            prompt = rng.choice(self.single if rng.random() < single_share else self.several)
            images.append(np.asarray(draw(rng, prompt, size)))
            texts.append(self.tokens(self.words(prompt)))
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
        patches = to_patches(pixels.contiguous(), SHAPE.patch)
        return Batch(size, patches, torch.tensor(texts))

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


class Painting(Task[Batch]):
    warm_up_steps = 100
    average_decay = 0.998

    def __init__(self, out: Path, seed: int, batch: int) -> None:
        torch.manual_seed(seed)
        self.out, self.seed, self.batch = out, seed, batch
        self.network = build_network()
        parts = divided(
            self.network, lambda name, _: name.startswith("layers") and name.endswith("weight")
        )
        self.optimizers = muon_and_adamw(*parts, rates=(6e-3, 3e-3), decay=0.01, beta=0.98)
        self.places: dict[Size, Tensor] = {}
        for width, height in (SIZE, *OTHER_SIZES):
            rows, columns = height // SHAPE.patch, width // SHAPE.patch
            self.places[width, height] = places_of(rows, columns).float()

    def fall(self, progress: float) -> float:
        return late_fall(progress, FALL_SHARE)

    def draw(self, steps: int, progress: Synchronized[float]) -> Iterator[Batch]:
        prompts = [prompt for prompt in all_prompts() if not prompt.is_held_out]
        drawings = Drawings(prompts, self.batch, f"{self.seed}/train/{steps}")
        while True:
            yield drawings.next(1.0 if progress.value < SINGLE_PART else SINGLE_SHARE)

    def loss(self, batch: Batch, progress: float) -> tuple[Tensor, dict[str, float]]:
        count, images = len(batch.images), batch.images
        text = torch.where(torch.rand(count, 1) < DROPPED_SHARE, PAD_ID, batch.text)
        times = torch.sigmoid(torch.randn(count) - 0.4)
        noisy = torch.lerp(torch.randn_like(images), images, times[:, None, None])
        # Matrices in half precision are fast, but not the backward pass of torch's fused attention.
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            painted: Tensor = self.network(noisy, times, text, self.places[batch.size])
        left = (1 - times).clamp(min=LEAST_NOISE)[:, None, None]
        return (((painted.float() - images) / left) ** 2).mean(), {}

    def save(self, weights: Mapping[str, Tensor], state: State) -> None:
        """Write the weights in half precision, the sizes, and the demo model's tokenizer."""
        self.out.mkdir(parents=True, exist_ok=True)
        half = {name: value.to(torch.float16).contiguous() for name, value in weights.items()}
        save_file(half, self.out / WEIGHTS_FILE, {"format": "pt"})
        sizes = (SHAPE.width, SHAPE.depth, SHAPE.patch, SHAPE.num_tokens, SHAPE.max_text)
        config = PainterConfig("pagemill_painter", *sizes, PAD_ID, SCALE)
        text = msgspec.json.format(msgspec.json.encode(config), indent=2)
        (self.out / CONFIG_FILE).write_bytes(text + b"\n")
        shutil.copyfile(TOKENIZER, self.out / TOKENIZER_FILE)
