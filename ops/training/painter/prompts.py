"""Prompts of the painter and the drawings that it learns them from."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from PIL import Image, ImageDraw

from ops.training.seeing.samples import description
from ops.training.seeing.scenes import (
    COLOUR_NAMES,
    COLOURS,
    MAX_COUNT,
    SHAPE_NAMES,
    Rgb,
    Scene,
    Size,
    paint_of,
    put_shape,
)

# Drawn at this multiple of the network's pixels and reduced, so that edges have shades.
FINER = 4
PLAIN_COLOUR_SHARE = 1.0
OTHER_WORDS_SHARE = 0.2
# The training leaves out one of this number of prompts.
HELD_OUT_EVERY = 12
NUMBER_WORDS = ("one", "two", "three", "four", "five")
# Radius and places of the shapes, for each count. Unit is the shorter side, origin the middle.
LAYOUTS: tuple[tuple[float, tuple[tuple[float, float], ...]], ...] = (
    (0.33, ((0.0, 0.0),)),
    (0.185, ((0.21, -0.1), (-0.21, 0.1))),
    (0.135, ((-0.083, -0.317), (0.301, 0.159), (-0.301, 0.317))),
    (0.14, ((-0.047, -0.313), (-0.265, 0.137), (0.265, 0.313), (0.165, -0.052))),
    (
        0.135,
        ((-0.259, -0.081), (0.311, -0.31), (-0.008, 0.223), (-0.334, 0.299), (0.334, 0.31)),
    ),
)
# Largest distance of a shape from its place, and the smallest and largest share of its radius.
STRAY = 0.015
PARTS = 0.94, 1.03
TILT = 5.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The required content of a drawing."""

    count: int
    colour: str
    shape: str
    background: str

    @property
    def text(self) -> str:
        """Description of such a drawing in the words of the demo model."""
        scene = Scene("count", self.colour, self.background, self.shape, self.count)
        return description(scene) or ""

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.text.encode()) % HELD_OUT_EVERY == 0


def all_prompts() -> list[Prompt]:
    return [
        Prompt(count, colour, shape, background)
        for count in range(1, MAX_COUNT + 1)
        for colour in COLOUR_NAMES
        for shape in SHAPE_NAMES
        for background in COLOUR_NAMES
        if background != colour
    ]


def other_words(rng: random.Random, prompt: Prompt) -> str:
    """The prompt in words that a person might choose."""
    words = prompt.text.split(" ")
    if words[0].isdigit() or rng.random() < 0.3:
        words[0] = NUMBER_WORDS[prompt.count - 1]
    if rng.random() < 0.6:
        article = "an" if prompt.background[0] in "aeiou" else "a"
        words[-1:] = [article, prompt.background, "background"]
    return " ".join(words)


def paint(rng: random.Random, name: str) -> Rgb:
    return COLOURS[name][1] if rng.random() < PLAIN_COLOUR_SHARE else paint_of(rng, name)


def places(rng: random.Random, count: int, size: Size) -> list[tuple[float, float, float]]:
    """Middle and radius of each shape: the layout of this count, a little changed."""
    short = min(size)
    radius, layout = LAYOUTS[count - 1]
    return [
        (
            size[0] / 2 + short * (u + rng.uniform(-STRAY, STRAY)),
            size[1] / 2 + short * (v + rng.uniform(-STRAY, STRAY)),
            short * radius * rng.uniform(*PARTS),
        )
        for u, v in layout
    ]


def draw(rng: random.Random, prompt: Prompt, size: Size) -> Image.Image:
    """A drawing of `size`, which is of the network's pixels."""
    large = (size[0] * FINER, size[1] * FINER)
    image = Image.new("RGB", large, paint(rng, prompt.background))
    pen, colour = ImageDraw.Draw(image), paint(rng, prompt.colour)
    for place in places(rng, prompt.count, large):
        put_shape(rng, pen, prompt.shape, place, colour, TILT)
    return image.reduce(FINER)
