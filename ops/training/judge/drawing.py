"""Drawings of the judge: signed distances on a grid of pixels, and fonts that training has not.

Nothing here is shared with the program that draws the pictures of the training.
"""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFont

Field = NDArray[np.float64]
Random = np.random.Generator

# Tones that people call by these names, from lists of named colours.
TONES: dict[str, tuple[str, ...]] = {
    "red": ("ff0000", "dc143c", "b22222", "cc0000", "e52b20"),
    "orange": ("ffa500", "ff8c00", "f57f17", "ff7f1e"),
    "yellow": ("ffff00", "ffe600", "fdee30", "fff44f"),
    "green": ("008000", "228b22", "32cd32", "006400", "2e8b57"),
    "blue": ("0000ff", "4169e1", "00008b", "1e50c8", "1f75fe"),
    "purple": ("800080", "663399", "8a2be2", "6a0dad"),
    "pink": ("ffc0cb", "ff69b4", "ffb6c1", "f78fb3"),
    "brown": ("8b4513", "654321", "a0522d", "7b3f00"),
    "black": ("000000", "0a0a0a", "141414"),
    "white": ("ffffff", "fafafa", "fffafa"),
    "gray": ("808080", "696969", "a0a0a0", "757575"),
}
# Names that lie too near to one another to be shown together.
NEAR = ({"black", "brown"}, {"white", "yellow"}, {"red", "brown"}, {"orange", "brown"})
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
FONT_ROOT = Path("/usr/share/fonts/truetype")
FONTS = (
    "liberation/LiberationSans-Regular.ttf", "liberation/LiberationSans-Bold.ttf",
    "liberation/LiberationSerif-Regular.ttf", "liberation/LiberationSerif-Bold.ttf",
    "liberation/LiberationMono-Bold.ttf", "liberation/LiberationSansNarrow-Bold.ttf",
)  # fmt: skip
GLYPH_SIZE = 200


def tone(rng: Random, name: str) -> Field:
    """A tone of a colour, a little off the one in the list."""
    code = str(rng.choice(TONES[name]))
    rgb = np.array([int(code[i : i + 2], 16) for i in (0, 2, 4)], dtype=np.float64)
    return np.clip(rgb + rng.integers(-5, 6, 3), 0, 255)


def two_names(rng: Random) -> tuple[str, str]:
    """Two colours that differ plainly."""
    while True:
        first, second = (str(name) for name in rng.choice(list(TONES), 2, replace=False))
        if {first, second} not in NEAR:
            return first, second


def surface(rng: Random, name: str, width: int, height: int) -> Field:
    """A surface of one colour: even, shaded from a corner, or grainy."""
    base = np.broadcast_to(tone(rng, name), (height, width, 3)).copy()
    style = rng.random()
    if style < 0.2:
        share = np.hypot(*np.meshgrid(np.linspace(0, 0.7, width), np.linspace(0, 0.7, height)))
        base += share[..., None] * (tone(rng, name) - base)
    elif style < 0.35:
        base += rng.normal(0, 5, base.shape)
    return base


def polygon_distance(x: Field, y: Field, corners: Field) -> Field:
    """The distance to the edge of a polygon, negative inside."""
    nearest = np.full(x.shape, np.inf)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        dx, dy = bx - ax, by - ay
        along = np.clip(((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy), 0, 1)
        nearest = np.minimum(nearest, np.hypot(x - ax - along * dx, y - ay - along * dy))
        if ay != by:
            crossing = (ay > y) != (by > y)
            inside ^= crossing & (x < ax + (y - ay) * dx / dy)
    return np.where(inside, -nearest, nearest)


def shape_distance(shape: str, x: Field, y: Field) -> Field:
    """The distance to a shape's edge in units of its radius; y points down."""
    if shape == "circle":
        return np.hypot(x, y) - 0.95
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.8
    if shape == "cross":
        bars = (np.maximum(np.abs(x) - a, np.abs(y) - b) for a, b in ((0.28, 0.95), (0.95, 0.28)))
        return np.minimum(*bars)
    if shape == "triangle":
        return polygon_distance(x, y, np.array([(0.0, -0.95), (0.95, 0.72), (-0.95, 0.72)]))
    if shape == "star":
        turn = np.arange(10) * np.pi / 5
        reach = np.where(np.arange(10) % 2 == 0, 1.0, 0.4)
        return polygon_distance(x, y, np.stack([np.sin(turn), -np.cos(turn)], 1) * reach[:, None])
    lobes = np.hypot(np.abs(x) - 0.46, y + 0.36) - 0.5
    tip = polygon_distance(x, y, np.array([(0.0, -0.45), (0.84, -0.1), (0.0, 0.95), (-0.84, -0.1)]))
    return np.minimum(lobes, tip)


class Look:
    """Style of the shapes of one picture."""

    def __init__(self, rng: Random) -> None:
        self.angle = float(rng.normal(0, 0.12)) if rng.random() < 0.5 else 0.0
        self.soft = bool(rng.random() < 0.7)
        self.line = float(rng.uniform(0.22, 0.35)) if rng.random() < 0.12 else 0.0


def put_shape(
    canvas: Field,
    shape: str,
    at: tuple[float, float, float],
    colour: Field,
    look: Look,
) -> None:
    """Draws a shape; `at` is its middle and its radius in pixels."""
    x, y, radius = at
    reach = 1.5 * radius + 2
    left, top = max(0, int(x - reach)), max(0, int(y - reach))
    # Only the pixels that the shape may touch.
    canvas = canvas[top : max(0, int(y + reach)), left : max(0, int(x + reach))]
    height, width = canvas.shape[:2]
    px, py = np.meshgrid(np.arange(width) + left + 0.5 - x, np.arange(height) + top + 0.5 - y)
    cos, sin = np.cos(look.angle), np.sin(look.angle)
    u, v = (cos * px + sin * py) / radius, (cos * py - sin * px) / radius
    distance = shape_distance(shape, u, v) * radius
    if look.line:
        distance = np.maximum(distance, -distance - look.line * radius)
    coverage = np.clip(0.5 - distance, 0, 1) if look.soft else (distance < 0).astype(np.float64)
    canvas += coverage[..., None] * (colour - canvas)


@lru_cache(64)
def face(name: str) -> Any:
    return ImageFont.truetype(FONT_ROOT / name, GLYPH_SIZE)


@lru_cache(512)
def letter_coverage(character: str, font: str) -> Field:
    """The coverage of a character at a large size, without any margin."""
    mask = face(font).getmask(character, mode="L")
    return np.asarray(mask, dtype=np.float64).reshape(mask.size[1], mask.size[0]) / 255


def put_letter(
    canvas: Field, character: str, font: str, at: tuple[float, float, float], colour: Field
) -> None:
    """Draws a character by averaging its large mask; `at` is its middle and its height."""
    large = letter_coverage(character, font)
    x, y, tall = at
    height, width = canvas.shape[:2]
    scale = large.shape[0] / tall
    steps = max(1, int(scale))
    offsets = (np.arange(steps) + 0.5) / steps
    padded = np.pad(large, 1)

    def samples(length: int, middle: float, size: int) -> NDArray[np.int64]:
        points = (np.arange(length)[:, None] + offsets - middle) * scale + size / 2
        clipped: NDArray[np.int64] = np.clip(np.floor(points).astype(np.int64) + 1, 0, size + 1)
        return clipped

    rows, columns = samples(height, y, large.shape[0]), samples(width, x, large.shape[1])
    coverage = padded[rows][:, :, columns].mean(axis=(1, 3))
    canvas += coverage[..., None] * (colour - canvas)


def to_file(rng: Random, canvas: Field) -> bytes:
    """The picture as a file of one of three formats."""
    picture = Image.fromarray(np.clip(np.rint(canvas), 0, 255).astype(np.uint8))
    file = io.BytesIO()
    kind = rng.choice(("PNG", "JPEG", "WEBP"))
    if kind == "PNG":
        picture.save(file, "PNG")
    else:
        picture.save(file, str(kind), quality=int(rng.integers(50, 96)))
    return file.getvalue()


def to_clip(canvases: list[Field], frame_ms: int) -> bytes:
    """The frames as an animated GIF."""
    frames = [Image.fromarray(np.clip(np.rint(c), 0, 255).astype(np.uint8)) for c in canvases]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=frame_ms)
    return file.getvalue()
