"""Digits and letters in many fonts. One font consists of strokes that the program draws."""

from __future__ import annotations

import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

# Fonts that the machine lacks are left out. Pillow has one more font.
FONTS_FOLDER = Path("/usr/share/fonts/truetype")
FONT_FILES = (
    "dejavu/DejaVuSans.ttf", "dejavu/DejaVuSans-Bold.ttf", "dejavu/DejaVuSerif.ttf",
    "dejavu/DejaVuSerif-Bold.ttf", "dejavu/DejaVuSansMono.ttf", "dejavu/DejaVuSansMono-Bold.ttf",
    "dejavu/DejaVuSansCondensed.ttf", "freefont/FreeSans.ttf", "freefont/FreeSansBold.ttf",
    "freefont/FreeSansOblique.ttf", "freefont/FreeSerif.ttf", "freefont/FreeSerifBold.ttf",
    "freefont/FreeMono.ttf", "freefont/FreeMonoBold.ttf", "lato/Lato-Regular.ttf",
    "lato/Lato-Bold.ttf", "lato/Lato-Light.ttf", "lato/Lato-Black.ttf",
    "open-sans/OpenSans-Regular.ttf", "open-sans/OpenSans-Bold.ttf",
    "open-sans/OpenSans-CondensedBold.ttf", "comfortaa/Comfortaa-Bold.ttf", "hack/Hack-Bold.ttf",
)  # fmt: skip
GLYPH_HEIGHT = 72
MARGIN = 6

# One line each through points on a grid of 4 by 6, a pair of digits a point.
STROKES = {
    "0": "10 30 41 45 36 16 05 01 10", "1": "02 20 26 06 46", "2": "01 10 30 41 42 06 46",
    "3": "01 10 30 41 42 33 13 33 44 45 36 16 05", "4": "36 30 04 44",
    "5": "40 00 02 32 43 45 36 06", "6": "40 20 02 05 16 36 45 44 33 13 04", "7": "00 40 16",
    "8": "10 30 41 42 33 13 02 01 10 13 04 05 16 36 45 44 33",
    "9": "42 33 13 02 01 10 30 41 44 26 06", "A": "06 20 46 34 14",
    "B": "00 30 41 42 33 03 33 44 45 36 06 00", "C": "41 30 10 01 05 16 36 45",
    "D": "00 30 41 45 36 06 00", "E": "40 00 03 33 03 06 46", "F": "40 00 03 33 03 06",
    "G": "41 30 10 01 05 16 36 45 43 23", "H": "00 06 03 43 40 46", "I": "20 26",
    "J": "40 45 36 16 05 04", "K": "00 06 03 40 03 46", "L": "00 06 46", "M": "06 00 23 40 46",
    "N": "06 00 46 40", "O": "10 30 41 45 36 16 05 01 10", "P": "06 00 30 41 42 33 03",
    "Q": "10 30 41 45 36 16 05 01 10 10 34 46", "R": "06 00 30 41 42 33 03 23 46",
    "S": "41 30 10 01 02 13 33 44 45 36 16 05", "T": "00 40 20 26", "U": "00 05 16 36 45 40",
    "V": "00 26 40", "W": "00 16 22 36 40", "X": "00 46 23 40 06", "Y": "00 23 40 23 26",
    "Z": "00 40 06 46",
}  # fmt: skip


@cache
def fonts() -> tuple[Any, ...]:
    files = [FONTS_FOLDER / name for name in FONT_FILES]
    own = ImageFont.load_default(GLYPH_HEIGHT)
    return own, *(ImageFont.truetype(file, GLYPH_HEIGHT) for file in files if file.exists())


@cache
def glyph(character: str, font: int) -> Image.Image:
    """The coverage of a character in a font, cut to its edges with a margin."""
    face = fonts()[font]
    left, top, right, bottom = (math.floor(edge) for edge in face.getbbox(character))
    size = (right - left + 2 * MARGIN + 1, bottom - top + 2 * MARGIN + 1)
    mask = Image.new("L", size)
    ImageDraw.Draw(mask).text((MARGIN - left, MARGIN - top), character, fill=255, font=face)
    return mask


def stroked(rng: random.Random, character: str) -> Image.Image:
    """A character of strokes, with corners not quite in their places and a pen of any width."""
    step, pen = GLYPH_HEIGHT / 6, rng.randint(4, 13)
    # The round letter is wider than the digit, as in most fonts.
    wide = rng.uniform(0.95, 1.2) if character in "OQ" else rng.uniform(0.75, 1.0)
    edge = MARGIN + pen / 2
    size = (round(4 * step * wide + 2 * edge), round(6 * step + 2 * edge))
    mask = Image.new("L", size)
    draw = ImageDraw.Draw(mask)
    points = [
        (
            edge + (int(x) + rng.uniform(-0.12, 0.12)) * step * wide,
            edge + (int(y) + rng.uniform(-0.12, 0.12)) * step,
        )
        for x, y in map(tuple, STROKES[character].split())
    ]
    draw.line(points, fill=255, width=pen, joint="curve")
    for px, py in points:
        draw.ellipse((px - pen / 2, py - pen / 2, px + pen / 2, py + pen / 2), fill=255)
    return mask


def glyph_mask(rng: random.Random, character: str, height: float) -> Image.Image:
    """A character of about this height in pixels, in any font, slightly turned or slanted."""
    if rng.random() < 0.12:
        mask = stroked(rng, character)
    else:
        mask = glyph(character, rng.randrange(len(fonts())))
    scale = height / GLYPH_HEIGHT
    lot = rng.random()
    angle = math.radians(rng.uniform(-14, 14)) if lot < 0.45 else 0.0
    slant = rng.uniform(-0.2, 0.2) if lot > 0.85 else 0.0
    wide = scale * rng.uniform(0.93, 1.07)
    turn = np.array([(math.cos(angle), -math.sin(angle)), (math.sin(angle), math.cos(angle))])
    forward = turn @ np.array([(wide, slant * scale), (0.0, scale)])
    width, tall = mask.size
    reach = np.abs(forward) @ np.array([width, tall])
    size = (max(2, math.ceil(reach[0])), max(2, math.ceil(reach[1])))
    back: NDArray[np.float64] = np.linalg.inv(forward)
    shift = np.array([width, tall]) / 2 - back @ (np.array(size) / 2)
    matrix = (*back[0].tolist(), float(shift[0]), *back[1].tolist(), float(shift[1]))
    if scale < 0.5:
        # Reduced first, so that thin lines do not fall between the samples.
        half = mask.reduce(2)
        matrix = tuple(value / 2 for value in matrix)
        mask = half
    return mask.transform(size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
