"""Scenes of the training pictures: drawn shapes, counts, characters and their places."""

from __future__ import annotations

import colorsys
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
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

TRAIN_STREAM = "train"
HELD_OUT_STREAM = "held-out"

console = Console()


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
NOISE_SHARE = 0.2


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
    """What a picture shows; None where a question about it would have no single answer."""

    kind: str
    colour: str | None = None
    background: str | None = None
    shape: str | None = None
    count: int | None = None
    character: str | None = None
    side: str | None = None


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
    rng: random.Random, draw: ImageDraw.ImageDraw, shape: str, at: Sequence[float], paint: Rgb
) -> None:
    """Draws one shape; `at` is its middle and its radius."""
    x, y, radius = at
    angle = math.radians(rng.uniform(-12, 12))
    spin = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    points = OUTLINES[shape] @ spin * radius + (x, y)
    draw.polygon([(px, py) for px, py in points.tolist()], fill=paint)


def draw_plain(
    rng: random.Random, width: int, height: int, colours: tuple[str, str]
) -> tuple[Image.Image, Scene]:
    colour = colours[0]
    return Image.new("RGB", (width, height), paint_of(rng, colour)), Scene("plain", colour)


def draw_shape(
    rng: random.Random, width: int, height: int, colours: tuple[str, str]
) -> tuple[Image.Image, Scene]:
    colour, background = colours
    shape = rng.choice(SHAPE_NAMES)
    picture = Image.new("RGB", (width, height), paint_of(rng, background))
    radius = rng.uniform(0.2, 0.46) * min(width, height)
    x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
    put_shape(rng, ImageDraw.Draw(picture), shape, (x, y, radius), paint_of(rng, colour))
    return picture, Scene("shape", colour, background, shape, 1)


def spread(rng: random.Random, count: int, width: int, height: int) -> list[tuple[float, ...]]:
    """Places for `count` shapes that keep clear of one another."""
    short = min(width, height)
    radius = rng.uniform(0.11, 0.24 if count < 3 else 0.17) * short
    places: list[tuple[float, ...]] = []
    while len(places) < count:
        own = radius * rng.uniform(0.85, 1.0)
        x, y = rng.uniform(own, width - own), rng.uniform(own, height - own)
        gap = 0.03 * short
        if all(math.hypot(x - px, y - py) > own + pr + gap for px, py, pr in places):
            places.append((x, y, own))
        else:
            # A crowded picture gets smaller shapes rather than an endless search.
            radius = max(radius * 0.98, 0.1 * short)
    return places


def draw_count(
    rng: random.Random, width: int, height: int, colours: tuple[str, str]
) -> tuple[Image.Image, Scene]:
    count = rng.randint(1, MAX_COUNT)
    colour, background = colours
    shape = rng.choice(SHAPE_NAMES)
    one_colour, one_shape = rng.random() < 0.75, rng.random() < 0.75
    picture = Image.new("RGB", (width, height), paint_of(rng, background))
    draw = ImageDraw.Draw(picture)
    paint = paint_of(rng, colour)
    others = [name for name in COLOUR_NAMES if name != background]
    for place in spread(rng, count, width, height):
        own_paint = paint if one_colour else paint_of(rng, rng.choice(others))
        put_shape(rng, draw, shape if one_shape else rng.choice(SHAPE_NAMES), place, own_paint)
    return picture, Scene(
        "count", colour if one_colour else None, background, shape if one_shape else None, count
    )


def draw_where(
    rng: random.Random, width: int, height: int, colours: tuple[str, str]
) -> tuple[Image.Image, Scene]:
    colour, background = colours
    shape, side = rng.choice(SHAPE_NAMES), rng.choice(SIDES)
    picture = Image.new("RGB", (width, height), paint_of(rng, background))
    radius = rng.uniform(0.12, 0.2) * min(width, height)
    near, middle = rng.uniform(0.0, 0.28), rng.uniform(0.4, 0.6)
    far = 1 - near if side in ("right", "bottom") else near
    u, v = (far, middle) if side in ("left", "right") else (middle, far)
    x = min(max(u * width, radius), width - radius)
    y = min(max(v * height, radius), height - radius)
    put_shape(rng, ImageDraw.Draw(picture), shape, (x, y, radius), paint_of(rng, colour))
    return picture, Scene("where", colour, background, shape, 1, side=side)


@lru_cache(maxsize=256)
def font_of(size: int) -> Any:
    return ImageFont.load_default(size)


def draw_character(
    rng: random.Random, width: int, height: int, colours: tuple[str, str]
) -> tuple[Image.Image, Scene]:
    colour, background = colours
    character = rng.choice(CHARACTERS)
    picture = Image.new("RGB", (width, height), paint_of(rng, background))
    # Sizes in steps of four keep the cache of fonts small.
    size = 4 * round(rng.uniform(0.55, 1.15) * min(width, height) / 4)
    font = font_of(size)
    left, top, right, bottom = font.getbbox(character, anchor="mm")
    margin_x = max(0.0, (width - (right - left)) / 2 - 2)
    margin_y = max(0.0, (height - (bottom - top)) / 2 - 2)
    x = width / 2 - (left + right) / 2 + rng.uniform(-1, 1) * 0.8 * margin_x
    y = height / 2 - (top + bottom) / 2 + rng.uniform(-1, 1) * 0.8 * margin_y
    mask = Image.new("L", (width, height))
    ImageDraw.Draw(mask).text((x, y), character, fill=255, font=font, anchor="mm")
    if rng.random() < 0.5:
        turned_about = (x + (left + right) / 2, y + (top + bottom) / 2)
        mask = mask.rotate(rng.uniform(-10, 10), Image.Resampling.BILINEAR, center=turned_about)
    picture.paste(paint_of(rng, colour), mask=mask)
    return picture, Scene("character", colour, background, character=character)


Painter = Callable[[random.Random, int, int, tuple[str, str]], tuple[Image.Image, Scene]]
PAINTERS: dict[str, Painter] = {
    "plain": draw_plain,
    "shape": draw_shape,
    "count": draw_count,
    "where": draw_where,
    "character": draw_character,
}


def draw_scene(
    rng: random.Random, kind: str, size: tuple[int, int], colours: tuple[str, str] | None = None
) -> tuple[Image.Image, Scene]:
    if colours is None:
        colours = (rng.choice(COLOUR_NAMES), "") if kind == "plain" else two_colours(rng)
    picture, scene = PAINTERS[kind](rng, *size, colours)
    if rng.random() < NOISE_SHARE:
        grain = np.random.default_rng(rng.getrandbits(32)).integers(
            -6, 7, (size[1], size[0], 3), dtype=np.int16
        )
        noisy = np.clip(np.asarray(picture, dtype=np.int16) + grain, 0, 255)
        picture = Image.fromarray(noisy.astype(np.uint8))
    return picture, scene


ASPECTS = (1.0, 1.0, 1.0, 4 / 3, 3 / 4, 3 / 2, 2 / 3, 16 / 9, 9 / 16, 2.0, 0.5)
PLAIN_ASPECTS = (*ASPECTS, 3.0, 1 / 3, 6.0, 1 / 6)


def any_size(rng: random.Random, kind: str, longest: int) -> tuple[int, int]:
    """Width and height of a picture as a person might bring it."""
    aspect = rng.choice(PLAIN_ASPECTS if kind == "plain" else ASPECTS)
    side = math.exp(rng.uniform(math.log(56), math.log(longest)))
    return max(12, round(side * aspect**0.5)), max(12, round(side / aspect**0.5))


Size = tuple[int, int]


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
    found: dict[Size, list[Size]] = {}
    for _ in range(5000):
        size = any_size(rng, "shape", longest=260)
        found.setdefault(fit(*size), []).append(size)
    return found


def common_fit(rng: random.Random) -> Size:
    found = sizes_by_fit()
    return rng.choices(tuple(found), [len(sizes) for sizes in found.values()])[0]


def training_size(rng: random.Random, kind: str, final: Size) -> Size:
    """A size that is resized to `final`, save for some plain pictures of extreme shapes.

    The pictures of a batch have one size for speed. Half of them are drawn at their final size,
    which saves the cost of resizing.
    """
    if kind == "plain" and rng.random() < 0.3:
        return any_size(rng, kind, longest=260)
    return final if rng.random() < 0.5 else rng.choice(sizes_by_fit()[final])
