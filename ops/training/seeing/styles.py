"""Styles of the training pictures: paints, grounds, edges, noise and file formats."""

from __future__ import annotations

import colorsys
import io
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from ops.training.seeing.scenes import COLOURS, OUTLINES, Rgb, Size

Points = NDArray[np.float64]

# Wider than COLOURS, which the painter paints with: hue, saturation and value as (low, high).
WIDE: dict[str, tuple[tuple[float, float], ...]] = {
    "red": ((-13, 9), (0.75, 1), (0.62, 1)),
    "orange": ((20, 41), (0.8, 1), (0.86, 1)),
    "yellow": ((49, 64), (0.6, 1), (0.86, 1)),
    "green": ((85, 155), (0.5, 1), (0.33, 1)),
    "blue": ((203, 246), (0.6, 1), (0.45, 1)),
    "purple": ((262, 304), (0.45, 1), (0.36, 0.93)),
    "pink": ((318, 353), (0.22, 0.64), (0.92, 1)),
    "brown": ((14, 34), (0.5, 0.9), (0.28, 0.64)),
    "black": ((0, 360), (0, 0.3), (0, 0.11)),
    "white": ((0, 360), (0, 0.04), (0.95, 1)),
    "gray": ((0, 360), (0, 0.07), (0.36, 0.72)),
}
PLAIN_SHARE = 0.3


def wide_paint(rng: random.Random, name: str) -> Rgb:
    """A paint that people call by this name."""
    if rng.random() < PLAIN_SHARE:
        return COLOURS[name][1]
    hue, saturation, value = (rng.uniform(*limits) for limits in WIDE[name])
    rgb = colorsys.hsv_to_rgb(hue / 360 % 1, saturation, value)
    return (round(rgb[0] * 255), round(rgb[1] * 255), round(rgb[2] * 255))


def ground(rng: random.Random, name: str, size: Size) -> Image.Image:
    """A surface of one colour: plain, from one tone to another, or with a texture of two tones."""
    width, height = size
    paint = wide_paint(rng, name)
    style = rng.random()
    share: NDArray[np.floating[Any]]
    if style < 0.6:
        return Image.new("RGB", size, paint)
    other = wide_paint(rng, name)
    if style < 0.78:
        angle = rng.uniform(0, 2 * math.pi)
        across = np.linspace(-0.5, 0.5, width)[None] * math.cos(angle)
        down = np.linspace(-0.5, 0.5, height)[:, None] * math.sin(angle)
        share = np.clip(0.5 + across + down, 0, 1)
    elif style < 0.9:
        step, angle = max(3.0, min(size) * rng.uniform(0.05, 0.2)), rng.uniform(0, math.pi)
        x, y = np.arange(width)[None], np.arange(height)[:, None]
        wave = np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / step)
        checks = wave * np.sin(y * 2 * math.pi / step) if rng.random() < 0.4 else wave
        share = rng.uniform(0.3, 0.6) * (checks > 0)
    else:
        cells = np.random.default_rng(rng.getrandbits(32)).random(
            (rng.randint(3, 12), rng.randint(3, 12)), dtype=np.float32
        )
        smooth = Image.fromarray(cells).resize(size, Image.Resampling.BILINEAR)
        share = np.asarray(smooth, dtype=np.float64)
    mixed = np.array(paint) + share[..., None] * (np.array(other) - np.array(paint))
    return Image.fromarray(mixed.astype(np.uint8))


def varied_outline(rng: random.Random, shape: str) -> Points:
    """The outline of a shape, as one of many people would draw it, in the square from -1 to 1."""
    points: Points = OUTLINES[shape]
    if shape == "star" and rng.random() < 0.6:
        inner = rng.uniform(0.36, 0.52) / 0.42
        points = points * np.where(np.arange(10) % 2 == 0, 1.0, inner)[:, None]
    elif shape == "cross" and rng.random() < 0.6:
        arm = rng.uniform(0.18, 0.42)
        points = np.where(np.abs(points) < 0.9, np.sign(points) * arm, np.sign(points))
    elif shape == "heart" and rng.random() < 0.5:
        points = _round_heart(rng)
    elif shape == "triangle" and rng.random() < 0.5:
        top = rng.uniform(-0.25, 0.25)
        points = np.array([(top, -1.0), (0.95, 0.75), (-0.95, 0.75)])
    stretch = np.array([rng.uniform(0.88, 1.12), 1.0])
    turned: Points = points * stretch @ _turn(_angle_of(rng, shape))
    return turned


def _round_heart(rng: random.Random) -> Points:
    """A heart of two half circles and a point."""
    dip = rng.uniform(0.42, 0.55)
    arc = np.linspace(-np.pi, 0.0, 14)
    bow = np.stack([np.cos(arc), np.sin(arc)], axis=1) * 0.5
    up = 0.1 - dip
    left, right = bow + np.array([-0.48, up]), bow + np.array([0.48, up])
    sides = np.array([(0.8, 0.2), (0.45, 0.58), (0.0, 1.0), (-0.45, 0.58), (-0.8, 0.2)])
    return np.concatenate([left, right, sides])


def _angle_of(rng: random.Random, shape: str) -> float:
    lot = rng.random()
    if lot < 0.4:
        return 0.0
    limit = 180.0 if shape in ("circle", "star") else 14.0 if lot < 0.85 else 45.0
    return math.radians(rng.uniform(-limit, limit))


def _turn(angle: float) -> Points:
    return np.array([(math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle))])


def shape_mask(size: Size, points: Points, at: Sequence[float], smooth: int) -> Image.Image:
    """The coverage of each pixel; `smooth` 1 gives hard edges."""
    x, y, radius = at
    mask = Image.new("L", (size[0] * smooth, size[1] * smooth))
    corners = ((points * radius + (x, y)) * smooth).tolist()
    ImageDraw.Draw(mask).polygon([(px, py) for px, py in corners], fill=255)
    return mask if smooth == 1 else mask.reduce(smooth)


def put_styled(
    rng: random.Random, picture: Image.Image, points: Points, at: Sequence[float], name: str
) -> None:
    """Draws one shape in a colour: filled, as a thick line, or filled with a thin border."""
    x, y, radius = at
    size = picture.size
    smooth = 1 if max(size) > 220 or rng.random() < 0.4 else 2
    box = _box(points, at, size)
    corner = (x - box[0], y - box[1], radius)
    inside = (box[2] - box[0], box[3] - box[1])
    mask = shape_mask(inside, points, corner, smooth)
    style = rng.random()
    if style < 0.14 and radius > 9:
        thin = (*corner[:2], radius * rng.uniform(0.6, 0.82))
        hole = shape_mask(inside, points, thin, smooth)
        mask = Image.fromarray(np.minimum(np.asarray(mask), 255 - np.asarray(hole)))
    elif style < 0.28 and radius > 9:
        picture.paste(wide_paint(rng, rng.choice(("black", "white", "gray", name))), box, mask)
        mask = shape_mask(inside, points, (*corner[:2], radius * rng.uniform(0.86, 0.95)), smooth)
    fill = ground(rng, name, inside) if rng.random() < 0.15 else wide_paint(rng, name)
    if isinstance(fill, Image.Image):
        picture.paste(fill, box, mask)
    else:
        picture.paste(fill, box, mask)


def _box(points: Points, at: Sequence[float], size: Size) -> tuple[int, int, int, int]:
    """The pixels that a shape may touch."""
    x, y, radius = at
    low, high = points.min(axis=0) * radius, points.max(axis=0) * radius
    left, top = max(0, math.floor(x + low[0]) - 1), max(0, math.floor(y + low[1]) - 1)
    right = min(size[0], math.ceil(x + high[0]) + 2)
    bottom = min(size[1], math.ceil(y + high[1]) + 2)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def reencoded(picture: Image.Image, kind: str, quality: int, subsampling: int = 2) -> Image.Image:
    """The picture after it was a file."""
    file = io.BytesIO()
    picture.save(file, kind, quality=quality, subsampling=subsampling, method=0)
    file.seek(0)
    return Image.open(file).convert("RGB")


def finished(rng: random.Random, picture: Image.Image) -> Image.Image:
    """The picture with the traces of cameras, editors and file formats."""
    if rng.random() < 0.15:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9)))
    if rng.random() < 0.2:
        width, height = picture.size
        amount = rng.choice((5, 9, 16))
        grain = np.random.default_rng(rng.getrandbits(32)).integers(
            -amount, amount + 1, (height, width, rng.choice((1, 3))), dtype=np.int16
        )
        noisy = np.clip(np.asarray(picture, dtype=np.int16) + grain, 0, 255)
        picture = Image.fromarray(noisy.astype(np.uint8))
    lot = rng.random()
    if lot < 0.25:
        return reencoded(picture, "JPEG", rng.randint(30, 95), rng.choice((0, 2)))
    if lot < 0.3:
        return reencoded(picture, "WEBP", rng.randint(40, 95))
    if lot < 0.34:
        return picture.quantize(64, Image.Quantize.FASTOCTREE).convert("RGB")
    return picture
