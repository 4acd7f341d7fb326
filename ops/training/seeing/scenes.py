"""Contents of the training pictures, with their colours and outlines, and the pictures' sizes."""

from __future__ import annotations

import colorsys
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

PATCH = 14
MERGE = 2
CELL = PATCH * MERGE
# Nearly every picture is brought to between 8 and 12 image tokens: the model only ever sees sizes
# it was trained on, and a training step stays cheap enough for a CPU.
MIN_PIXELS = 56 * 112
MAX_PIXELS = 103 * 103
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


# Hue in degrees, then saturation and value, as (low, high); the third entry is the plain colour
# that a person would type, which a part of the pictures uses unchanged.
COLOURS: dict[str, tuple[tuple[tuple[float, float], ...], tuple[int, int, int]]] = {
    "red": (((-7, 8), (0.78, 1), (0.68, 1)), (255, 0, 0)),
    "orange": (((22, 37), (0.85, 1), (0.9, 1)), (255, 140, 0)),
    "yellow": (((50, 63), (0.7, 1), (0.88, 1)), (255, 255, 0)),
    "green": (((95, 148), (0.55, 1), (0.4, 1)), (0, 128, 0)),
    "blue": (((208, 246), (0.65, 1), (0.55, 1)), (0, 0, 255)),
    "purple": (((266, 302), (0.5, 1), (0.36, 0.78)), (128, 0, 128)),
    "pink": (((322, 352), (0.25, 0.62), (0.93, 1)), (255, 105, 180)),
    "brown": (((16, 32), (0.55, 0.9), (0.32, 0.58)), (139, 69, 19)),
    "black": (((0, 360), (0, 0.3), (0, 0.09)), (0, 0, 0)),
    "white": (((0, 360), (0, 0.03), (0.96, 1)), (255, 255, 255)),
    "gray": (((0, 360), (0, 0.05), (0.4, 0.66)), (128, 128, 128)),
}
COLOUR_NAMES = tuple(COLOURS)
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SIDES = ("left", "right", "top", "bottom")
MAX_COUNT = 5
PLAIN_COLOUR_SHARE = 0.25


def _outlines() -> dict[str, np.ndarray]:
    """The shapes as polygons in the square from -1 to 1, y pointing down as in pictures."""
    turn = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    spike = np.arange(10) * np.pi / 5 - np.pi / 2
    reach = np.where(np.arange(10) % 2 == 0, 1.0, 0.42)
    star = np.stack([np.cos(spike), np.sin(spike)], axis=1) * reach[:, None]
    corner = np.array([-np.pi / 2, np.pi / 6, 5 * np.pi / 6])
    arm = 0.32
    half_cross = np.array([(-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm)])
    cross = np.concatenate([half_cross, -half_cross])
    heart_x = 16 * np.sin(turn) ** 3
    heart_y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
    return {
        "circle": circle,
        "square": np.array([(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]),
        "triangle": np.stack([np.cos(corner), np.sin(corner)], axis=1),
        "star": star,
        "cross": cross,
        "heart": np.stack([heart_x, -heart_y], axis=1) / 17,
    }


OUTLINES = _outlines()
SHAPE_NAMES = tuple(OUTLINES)

Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Scene:
    """Content of a picture. A field is None if a question about it would have no single answer."""

    kind: str
    colour: str | None = None
    background: str | None = None
    shape: str | None = None
    count: int | None = None
    character: str | None = None
    side: str | None = None
    motion: str | None = None
    change: str | None = None
    last_colour: str | None = None


def paint_of(rng: random.Random, name: str) -> Rgb:
    (hue, saturation, value), plain = COLOURS[name]
    if rng.random() < PLAIN_COLOUR_SHARE:
        return plain
    rgb = colorsys.hsv_to_rgb(
        rng.uniform(*hue) / 360 % 1, rng.uniform(*saturation), rng.uniform(*value)
    )
    return (round(rgb[0] * 255), round(rgb[1] * 255), round(rgb[2] * 255))


def two_colours(rng: random.Random) -> tuple[str, str]:
    """A colour and a different one for the background, which is white or black rather often."""
    background = rng.choice(("white", "white", "black", *COLOUR_NAMES, *COLOUR_NAMES))
    return rng.choice([name for name in COLOUR_NAMES if name != background]), background


def put_shape(
    rng: random.Random,
    draw: ImageDraw.ImageDraw,
    shape: str,
    at: Sequence[float],
    paint: Rgb,
    tilt: float = 12,
) -> None:
    """Draws one shape; `at` is its middle and its radius, `tilt` its greatest one in degrees."""
    x, y, radius = at
    angle = math.radians(rng.uniform(-tilt, tilt))
    spin = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    points = OUTLINES[shape] @ spin * radius + (x, y)
    draw.polygon([(px, py) for px, py in points.tolist()], fill=paint)


Size = tuple[int, int]
# Mean sides of the pictures that people bring.
SHORTEST, LONGEST = 40, 400
ASPECTS = (1.0, 1.0, 1.0, 4 / 3, 3 / 4, 3 / 2, 2 / 3, 16 / 9, 9 / 16, 2.0, 0.5)
PLAIN_ASPECTS = (*ASPECTS, 3.0, 1 / 3, 6.0, 1 / 6)


def any_size(rng: random.Random, kind: str, longest: int) -> tuple[int, int]:
    """Width and height of a picture as a person might bring it."""
    aspect = rng.choice(PLAIN_ASPECTS if kind == "plain" else ASPECTS)
    side = math.exp(rng.uniform(math.log(SHORTEST), math.log(longest)))
    return max(12, round(side * aspect**0.5)), max(12, round(side / aspect**0.5))


def fit(width: int, height: int) -> Size:
    """The size that the image processor resizes a picture to."""
    height, width = smart_resize(height, width, CELL, MIN_PIXELS, MAX_PIXELS)
    return width, height


def fitted(picture: Image.Image) -> Image.Image:
    """The picture at the size of the image processor, by the same filter."""
    size = fit(*picture.size)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.BICUBIC)


@cache
def sizes_by_fit() -> dict[Size, list[Size]]:
    """Sizes that people bring, by the size that they are resized to."""
    rng = random.Random("sizes")
    by_fit: dict[Size, list[Size]] = {}
    for _ in range(5000):
        size = any_size(rng, "shape", longest=LONGEST)
        by_fit.setdefault(fit(*size), []).append(size)
    return by_fit


def common_fit(rng: random.Random) -> Size:
    by_fit = sizes_by_fit()
    return rng.choices(tuple(by_fit), [len(sizes) for sizes in by_fit.values()])[0]


def training_size(rng: random.Random, kind: str, final: Size) -> Size:
    """A size that is resized to `final`, save for some plain pictures of extreme shapes.

    The pictures of a batch have one size for speed. Half of them are drawn at their final size,
    which saves the cost of resizing.
    """
    if kind == "plain" and rng.random() < 0.3:
        return any_size(rng, kind, longest=LONGEST)
    return final if rng.random() < 0.5 else rng.choice(sizes_by_fit()[final])
