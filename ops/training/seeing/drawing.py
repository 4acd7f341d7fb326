"""Drawn scenes: plain colours, shapes, counts, characters, places and clips."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from PIL import Image

from ops.training.seeing.glyphs import glyph_mask
from ops.training.seeing.scenes import (
    CHARACTERS,
    COLOUR_NAMES,
    MAX_COUNT,
    SHAPE_NAMES,
    SIDES,
    Scene,
    Size,
    two_colours,
)
from ops.training.seeing.styles import finished, ground, put_styled, varied_outline, wide_paint

Colours = tuple[str, str]
Drawn = tuple[Image.Image, Scene]


def draw_plain(rng: random.Random, size: Size, colours: Colours) -> Drawn:
    return ground(rng, colours[0], size), Scene("plain", colours[0])


def draw_shape(rng: random.Random, size: Size, colours: Colours) -> Drawn:
    colour, background = colours
    width, height = size
    shape = rng.choice(SHAPE_NAMES)
    picture = ground(rng, background, size)
    radius = rng.uniform(0.17, 0.48) * min(width, height)
    x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
    if rng.random() < 0.3:
        x, y = width / 2, height / 2
    put_styled(rng, picture, varied_outline(rng, shape), (x, y, radius), colour)
    return picture, Scene("shape", colour, background, shape, 1)


def scattered(rng: random.Random, count: int, size: Size) -> list[tuple[float, ...]]:
    """Places for `count` shapes that keep clear of one another."""
    width, height = size
    short = min(width, height)
    radius = rng.uniform(0.09, 0.24 if count < 3 else 0.18) * short
    least = rng.choice((0.6, 0.85, 0.95))
    places: list[tuple[float, ...]] = []
    tries = 0
    while len(places) < count:
        own = radius * rng.uniform(least, 1.0)
        x, y = rng.uniform(own, width - own), rng.uniform(own, height - own)
        gap = 0.03 * short
        if all(math.hypot(x - px, y - py) > own + pr + gap for px, py, pr in places):
            places.append((x, y, own))
        elif (tries := tries + 1) % 10 == 0:
            # A crowded picture gets smaller shapes rather than an endless search.
            radius *= 0.95
    return places


def in_rows(rng: random.Random, count: int, size: Size) -> list[tuple[float, ...]]:
    """Places for `count` shapes on a grid that is wide enough for them."""
    width, height = size
    columns = rng.randint(1, count)
    rows = -(-count // columns)
    cell = (width / columns, height / rows)
    radius = rng.uniform(0.24, 0.42) * min(cell)
    radius = min(radius, rng.uniform(0.12, 0.24) * min(size))
    jitter = rng.choice((0.0, 0.06))
    spots = [(column, row) for row in range(rows) for column in range(columns)]
    if rng.random() < 0.3:
        rng.shuffle(spots)
    return [
        (
            (column + 0.5 + rng.uniform(-jitter, jitter)) * cell[0],
            (row + 0.5 + rng.uniform(-jitter, jitter)) * cell[1],
            radius,
        )
        for column, row in spots[:count]
    ]


def draw_count(rng: random.Random, size: Size, colours: Colours, count: int | None = None) -> Drawn:
    count = count or rng.randint(1, MAX_COUNT)
    colour, background = colours
    shape = rng.choice(SHAPE_NAMES)
    one_colour, one_shape = rng.random() < 0.75, rng.random() < 0.75
    picture = ground(rng, background, size)
    others = [name for name in COLOUR_NAMES if name != background]
    points = varied_outline(rng, shape)
    placing = scattered if rng.random() < 0.65 else in_rows
    for place in placing(rng, count, size):
        own = points if one_shape else varied_outline(rng, rng.choice(SHAPE_NAMES))
        put_styled(rng, picture, own, place, colour if one_colour else rng.choice(others))
    return picture, Scene(
        "count", colour if one_colour else None, background, shape if one_shape else None, count
    )


def draw_where(rng: random.Random, size: Size, colours: Colours) -> Drawn:
    colour, background = colours
    width, height = size
    shape, side = rng.choice(SHAPE_NAMES), rng.choice(SIDES)
    picture = ground(rng, background, size)
    radius = rng.uniform(0.1, 0.22) * min(width, height)
    near, middle = rng.uniform(0.0, 0.3), rng.uniform(0.37, 0.63)
    far = 1 - near if side in ("right", "bottom") else near
    u, v = (far, middle) if side in ("left", "right") else (middle, far)
    x = min(max(u * width, radius), width - radius)
    y = min(max(v * height, radius), height - radius)
    put_styled(rng, picture, varied_outline(rng, shape), (x, y, radius), colour)
    return picture, Scene("where", colour, background, shape, 1, side=side)


def draw_character(
    rng: random.Random, size: Size, colours: Colours, character: str | None = None
) -> Drawn:
    colour, background = colours
    width, height = size
    character = character or rng.choice(CHARACTERS)
    picture = ground(rng, background, size)
    mask = glyph_mask(rng, character, rng.uniform(0.42, 1.1) * min(width, height))
    free_x, free_y = width - mask.width, height - mask.height
    x = free_x / 2 + rng.uniform(-0.45, 0.45) * max(0, free_x)
    y = free_y / 2 + rng.uniform(-0.45, 0.45) * max(0, free_y)
    at = (round(x), round(y))
    fill = ground(rng, colour, mask.size) if rng.random() < 0.1 else None
    if fill is not None:
        picture.paste(fill, at, mask)
    else:
        picture.paste(wide_paint(rng, colour), (*at, at[0] + mask.width, at[1] + mask.height), mask)
    return picture, Scene("character", colour, background, character=character)


Drawer = Callable[[random.Random, Size, Colours], Drawn]
DRAWERS: dict[str, Drawer] = {
    "plain": draw_plain,
    "shape": draw_shape,
    "count": draw_count,
    "where": draw_where,
    "character": draw_character,
}


def draw_scene(rng: random.Random, kind: str, size: Size, colours: Colours | None = None) -> Drawn:
    if colours is None:
        colours = (rng.choice(COLOUR_NAMES), "") if kind == "plain" else two_colours(rng)
    picture, scene = DRAWERS[kind](rng, size, colours)
    return finished(rng, picture), scene


MOTIONS = ("left", "right", "up", "down")
CHANGES = ("grows", "shrinks")
CLIP_KINDS = ("motion", "motion", "motion", "change", "change", "change", "colour", "colour")
NUMS_OF_FRAMES = (4, 4, 4, 4, 6, 6, 8)


def draw_clip(rng: random.Random, size: Size) -> tuple[list[Image.Image], Scene]:
    """Frames of one shape that moves, changes its size, or changes its colour."""
    colour, background = two_colours(rng)
    shape, kind = rng.choice(SHAPE_NAMES), rng.choice(CLIP_KINDS)
    frames_num = rng.choice(NUMS_OF_FRAMES)
    width, height = size
    short = min(size)
    radius = [rng.uniform(0.1, 0.24) * short] * frames_num
    motion = change = None
    if kind == "change":
        change = rng.choice(CHANGES)
        small, ratio = rng.uniform(0.08, 0.2) * short, rng.uniform(1.3, 2.4)
        steps = [small * (1 + (ratio - 1) * n / (frames_num - 1)) for n in range(frames_num)]
        radius = steps if change == "grows" else steps[::-1]
    most = max(radius)
    x, y = rng.uniform(most, width - most), rng.uniform(most, height - most)
    xs, ys = [x] * frames_num, [y] * frames_num
    if kind == "motion":
        motion = rng.choice(MOTIONS)
        length = width if motion in ("left", "right") else height
        room = length - 2 * most
        span = max(rng.uniform(0.25, 0.98) * room, min(room, 0.12 * length))
        start = most + rng.uniform(0, room - span)
        line = [start + span * n / (frames_num - 1) for n in range(frames_num)]
        line = line if motion in ("right", "down") else line[::-1]
        xs, ys = (line, ys) if motion in ("left", "right") else (xs, line)
    last = colour
    if kind == "colour":
        drift = [rng.uniform(-0.15, 0.15) * short * rng.choice((0, 1)) for _ in range(2)]
        steps = [n / (frames_num - 1) - 0.5 for n in range(frames_num)]
        xs = [x + drift[0] * step for step in steps]
        ys = [y + drift[1] * step for step in steps]
        last = rng.choice([name for name in COLOUR_NAMES if name not in (colour, background)])
    switch = rng.randint(1, frames_num - 1)
    points, surface, style = varied_outline(rng, shape), ground(rng, background, size), rng.random()
    end = rng.choice((finished, None, None)) if style < 0.5 else None
    frames = []
    for n in range(frames_num):
        frame, name = surface.copy(), colour if n < switch else last
        # Every frame is drawn by the same numbers, so that only what changes is different.
        put_styled(random.Random(style), frame, points, (xs[n], ys[n], radius[n]), name)
        frames.append(end(random.Random(style), frame) if end else frame)
    scene = Scene(
        "clip",
        None if kind == "colour" else colour,
        background,
        shape,
        1,
        motion=motion,
        change=change,
        last_colour=last,
    )
    return frames, scene
