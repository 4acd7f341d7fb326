"""The four workloads of all peers; every repetition has new prompts, so that no cache is warm."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ops.bench.peers.protocol import Request

# Control tokens are below these in some vocabularies, and above the last ones in others.
FIRST_ID, NUM_LAST_IDS = 300, 200
IMAGE_SIDE = 448
IMAGE_WORDS = 16
WORDS = ("red", "blue", "cat", "dog", "tree", "house", "river", "stone")
PREFIX_LEN = 512


@dataclass(frozen=True, slots=True)
class Maker:
    """A generator of one repetition's requests."""

    rng: random.Random
    vocab_size: int
    folder: Path
    """Folder for the files of images."""

    def token_ids(self, length: int) -> list[int]:
        last = self.vocab_size - NUM_LAST_IDS
        return [self.rng.randrange(FIRST_ID, last) for _ in range(length)]

    def image(self, side: int = IMAGE_SIDE) -> str:
        """Make a smooth image, because noise would be the worst case of PNG."""
        seed = self.rng.randrange(2**31)
        pixels = np.random.default_rng(seed).integers(0, 255, (28, 28, 3), dtype=np.uint8)
        drawn = Image.fromarray(pixels).resize((side,) * 2, Image.Resampling.BICUBIC)
        file = self.folder / f"{seed}.png"
        drawn.save(file, compress_level=1)
        return str(file)

    def text(self) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(IMAGE_WORDS))


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    make: Callable[[Maker], list[Request]]
    shared_prefix_len: int = 0
    """Tokens that all prompts begin with, and that are computed only once."""
    image_side: int = 0

    def requests(self, repetition: int, vocab_size: int, folder: Path) -> list[Request]:
        # Prompts differ between repetitions, and between vocabularies.
        return self.make(Maker(random.Random(1000 * repetition + 17), vocab_size, folder))


def _single(maker: Maker) -> list[Request]:
    return [Request(128, maker.token_ids(32))]


def _batch32(maker: Maker) -> list[Request]:
    return [Request(64, maker.token_ids(maker.rng.randint(64, 256))) for _ in range(32)]


def _prefix16(maker: Maker) -> list[Request]:
    prefix = maker.token_ids(PREFIX_LEN)
    return [Request(32, prefix + maker.token_ids(32)) for _ in range(16)]


def _mm16(maker: Maker) -> list[Request]:
    return [Request(32, image=maker.image(), text=maker.text()) for _ in range(16)]


WORKLOADS = (
    Workload("single", _single),
    Workload("batch32", _batch32),
    Workload("prefix16", _prefix16, shared_prefix_len=PREFIX_LEN),
    Workload("mm16", _mm16, image_side=IMAGE_SIDE),
)
