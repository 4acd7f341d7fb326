"""Prompts of the painter and the drawings that it learns them from."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from PIL import Image, ImageDraw

from ops.demo_training.samples import description
from ops.demo_training.scenes import (
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
# One prompt in so many is never trained on.
HELD_OUT_EVERY = 12
NUMBER_WORDS = ("one", "two", "three", "four", "five")
# Least and greatest radius of a shape, in shorter sides, by the count.
RADII = ((0.25, 0.38), (0.15, 0.21), (0.125, 0.155), (0.12, 0.15), (0.115, 0.145))
GAP = 0.045
MOST_TRIES = 40


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a drawing has to show."""

    count: int
    colour: str
    shape: str
    background: str

    @property
    def text(self) -> str:
        """The demo model's own words for such a drawing."""
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
    """Middle and radius of each shape, clear of one another and of the edges."""
    short = min(size)
    low, high = (short * part for part in RADII[count - 1])
    while True:
        found: list[tuple[float, float, float]] = []
        radius = rng.uniform(low, high)
        for _ in range(MOST_TRIES):
            own = radius * rng.uniform(0.92, 1.0)
            x, y = (rng.uniform(own, side - own) for side in size)
            if all(
                (x - ox) ** 2 + (y - oy) ** 2 > (own + other + GAP * short) ** 2
                for ox, oy, other in found
            ):
                found.append((x, y, own))
            if len(found) == count:
                return found


def draw(rng: random.Random, prompt: Prompt, size: Size) -> Image.Image:
    """A drawing of `size`, which is of the network's pixels."""
    large = (size[0] * FINER, size[1] * FINER)
    image = Image.new("RGB", large, paint(rng, prompt.background))
    pen, colour = ImageDraw.Draw(image), paint(rng, prompt.colour)
    for place in places(rng, prompt.count, large):
        put_shape(rng, pen, prompt.shape, place, colour)
    return image.reduce(FINER)
