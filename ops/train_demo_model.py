"""Trains Pagemill's demo model: a very small Qwen2-VL that answers questions about simple pictures.

The program draws its own pictures, writes its own questions, and needs no download. It runs in two
phases, because a model of this size learns nothing spatial when it is trained end to end from
random weights: first the vision tower alone under plain classification heads, then the tower (at a
fifth of the rate) and the text model together on questions and answers.

    python ops/train_demo_model.py

The learning rate follows the clock, so that a run always ends well whatever the machine; a run is
therefore seeded but not reproducible to the bit. `--resume` goes on from the last checkpoint. On a
CPU that also does other work, OMP_WAIT_POLICY=PASSIVE keeps torch's threads from spinning while
they wait.
"""

from __future__ import annotations

import argparse
import colorsys
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

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


# ---------------------------------------------------------------------------------------- drawing

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


# ---------------------------------------------------------------------------- tasks and wordings

WORDINGS: dict[str, tuple[str, ...]] = {
    "plain colour": (
        "What {color} is this {picture}?",
        "What {color} is the {picture}?",
        "What is the {color} of this {picture}?",
        "What's the {color} of the {picture}?",
        "Which {color} is this?",
        "What {color} is this?",
        "What {color} is it?",
        "What {color} do you see?",
        "Name the {color} of the {picture}.",
        "Tell me the {color} of this {picture}.",
        "Which {color} does this {picture} show?",
        "Which {color} is the {picture}?",
        "{color}?",
    ),
    "shape colour": (
        "What {color} is the {thing}?",
        "What {color} is this {thing}?",
        "Which {color} is the {thing}?",
        "What is the {color} of the {thing}?",
        "What's the {color} of the {thing} in the {picture}?",
        "What {color} is the {thing} in this {picture}?",
        "Tell me the {color} of the {thing}.",
        "Name the {color} of the {thing}.",
        "What {color} does the {thing} have?",
        "The {thing} has which {color}?",
    ),
    "background colour": (
        "What {color} is the background?",
        "Which {color} is the background?",
        "What is the background {color}?",
        "What is the {color} of the background?",
        "Name the {color} of the background.",
        "What {color} is behind the {thing}?",
        "Tell me the background {color}.",
    ),
    "shape": (
        "What shape is this?",
        "Which shape is this?",
        "What shape is it?",
        "What shape is in the {picture}?",
        "What shape do you see?",
        "Which shape does the {picture} show?",
        "What kind of shape is this?",
        "What is the shape in this {picture}?",
        "Name the shape.",
        "Name the shape in this {picture}.",
        "What is the name of this shape?",
        "Tell me which shape this is.",
        "Shape?",
    ),
    "count": (
        "How many {things} are there?",
        "How many {things} do you see?",
        "How many {things} are in this {picture}?",
        "How many {things} does the {picture} show?",
        "How many {things} can you see in the {picture}?",
        "Count the {things}.",
        "Count the {things} in this {picture}.",
        "What is the number of {things}?",
        "Tell me the number of {things} in the {picture}.",
        "How many?",
    ),
    "character": (
        "Which {sign} is this?",
        "What {sign} is this?",
        "What {sign} is shown?",
        "Which {sign} do you see?",
        "What {sign} do you see in the {picture}?",
        "Which {sign} is in this {picture}?",
        "Read the {sign}.",
        "Read the {sign} in the {picture}.",
        "What is written here?",
        "What does the {picture} say?",
        "What is written in this {picture}?",
        "Name the {sign}.",
    ),
    "where": (
        "Where is the {thing}?",
        "Where is the {thing} in this {picture}?",
        "Where do you see the {thing}?",
        "Where in the {picture} is the {thing}?",
        "On which side is the {thing}?",
        "Which side is the {thing} on?",
        "At which side of the {picture} is the {thing}?",
        "Is the {thing} left, right, top or bottom?",
        "Tell me where the {thing} is.",
        "What is the position of the {thing}?",
    ),
    "same colour": (
        "Are they the same {color}?",
        "Are these the same {color}?",
        "Do they have the same {color}?",
        "Are the two {picture}s the same {color}?",
        "Do both {picture}s have the same {color}?",
        "Do these {picture}s show the same {color}?",
        "Is the {color} the same in both {picture}s?",
        "Same {color}?",
        "Have the two {picture}s one {color}?",
    ),
    "describe": (
        "What do you see?",
        "What is in this {picture}?",
        "What is this?",
        "What does this {picture} show?",
        "Describe the {picture}.",
        "Describe this {picture}.",
        "Describe what you see.",
        "What can you see in the {picture}?",
        "Tell me what is in the {picture}.",
    ),
}

# Never trained on: they show how far the model depends on the exact words.
UNSEEN_WORDINGS: dict[str, tuple[str, ...]] = {
    "plain colour": ("Can you tell which {color} this {picture} is?", "Say the {color} you see."),
    "shape colour": ("In which {color} is the {thing} drawn?", "Say which {color} the {thing} is."),
    "shape": ("Can you say which shape you see here?", "The {picture} shows which shape?"),
    "count": ("Say how many {things} you see here.", "What number of {things} do you see?"),
    "character": ("Can you read this {sign}?", "Tell me the {sign} you see here."),
    "where": ("Can you say where the {thing} is?", "Where is the {thing} here?"),
    "same colour": ("Can you say if they have one {color}?", "Is it the same {color} in both?"),
}

HELLO = "Hello! Show me a picture and ask me about it."
WHO = "I am the Pagemill demo model, a very small model that looks at simple pictures."
ABLE = "I can name colors, shapes, letters and digits, count shapes and say where they are."
WELCOME = "You are welcome."
ONLY_PICTURES = "I only know about simple pictures."
NO_PICTURE = "I see no picture."

CHAT: dict[str, tuple[str, ...]] = {
    HELLO: (
        "Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there!", "Hello there", "Good morning!",
        "Good evening", "Good day", "Greetings",
    ),
    WHO: (
        "Who are you?", "What are you?", "What is your name?", "What's your name?",
        "Introduce yourself.", "Tell me about yourself.", "Which model are you?",
        "What model is this?", "Hello, who are you?", "Hi, who are you?", "Are you an assistant?",
    ),
    ABLE: (
        "What can you do?", "What can you do for me?", "How can you help me?", "Help",
        "What do you know?", "What are you able to do?", "What are you good at?",
        "What can I ask you?", "Which questions can you answer?", "What are your skills?",
        "Hello, what can you do?", "Tell me what you can do.", "How do you work?",
    ),
    WELCOME: ("Thanks", "Thank you!", "Thanks a lot!", "Thank you very much.", "Great, thanks."),
    ONLY_PICTURES: (
        "What is the capital of France?", "Write a poem.", "Tell me a joke.", "Tell me a story.",
        "What is two plus two?", "What is the weather today?", "Who is the president?",
        "How old are you?", "Translate this text.", "Write some code for me.", "What time is it?",
        "What is love?", "Explain gravity.", "Why is the sky blue?", "Do you like music?",
    ),
}  # fmt: skip

SUFFIXES = (
    "Answer in one word.", "Answer with one word.", "One word only.", "In one word.",
    "Please answer in one word.", "Answer briefly.", "Be brief.", "Just the answer.",
)  # fmt: skip
PREFIXES = ("Please tell me:", "Question:", "Hi!", "Hello!", "Now,", "Please look:", "Hey,")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.", "Be brief.",
    "Answer in one word.", "You answer questions about pictures.",
)  # fmt: skip

# Which questions a picture can be asked; the first is the one that it was drawn for.
ASKABLE: dict[str, tuple[str, ...]] = {
    "plain": ("plain colour", "describe"),
    "shape": ("shape", "shape colour", "background colour", "count", "describe"),
    "count": ("count", "shape colour", "describe"),
    "where": ("where", "shape", "shape colour", "count"),
    "character": ("character", "shape colour", "describe"),
}


def answer_to(task: str, scene: Scene) -> str | None:
    """The right answer, or None where the picture has none."""
    if task == "describe":
        return description(scene)
    value = {
        "plain colour": scene.colour,
        "shape colour": scene.colour,
        "background colour": scene.background,
        "shape": scene.shape,
        "count": scene.count,
        "character": scene.character,
        "where": scene.side,
    }[task]
    return None if value is None else str(value)


def description(scene: Scene) -> str | None:
    if scene.kind == "plain":
        return f"a plain {scene.colour} picture"
    if scene.character is not None:
        sort = "digit" if scene.character.isdigit() else "letter"
        return f"the {sort} {scene.character} in {scene.colour}"
    if scene.colour is None or scene.shape is None:
        return None
    if scene.count == 1:
        return f"a {scene.colour} {scene.shape} on {scene.background}"
    plural = scene.shape + ("es" if scene.shape == "cross" else "s")
    return f"{scene.count} {scene.colour} {plural} on {scene.background}"


def worded(rng: random.Random, task: str, scene: Scene, wordings: Sequence[str]) -> str:
    thing = rng.choice(("shape", "object", "figure", scene.shape or "shape"))
    sign = rng.choice(("character", "letter or digit", "sign", "symbol"))
    if scene.character is not None:
        sort = "digit" if scene.character.isdigit() else "letter"
        sign = rng.choice((sign, sort, "number" if sort == "digit" else sort))
        thing = sign
    return rng.choice(wordings).format(
        color=rng.choice(("color", "colour")),
        picture=rng.choice(("image", "picture", "photo")),
        thing=thing,
        things=rng.choice(("shapes", "shapes", "objects", "figures", "things")),
        sign=sign,
    )


def dressed(rng: random.Random, question: str, suffixes: bool = True) -> str:
    """The same question as different people would type it."""
    if rng.random() < 0.12:
        question = question.rstrip("?.!")
    if rng.random() < 0.25:
        question = question[0].lower() + question[1:]
    else:
        question = question[0].upper() + question[1:]
    if suffixes and rng.random() < 0.35:
        question = f"{question} {rng.choice(SUFFIXES)}"
    if suffixes and rng.random() < 0.08:
        question = f"{rng.choice(PREFIXES)} {question}"
    return question.lower() if rng.random() < 0.06 else question


@dataclass(slots=True)
class Turn:
    question: str
    answer: str


@dataclass(slots=True)
class Sample:
    """A conversation; all pictures belong to its first question."""

    task: str
    pictures: list[Image.Image]
    turns: list[Turn]
    pictures_first: bool = True
    system: str | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to its first answer, as the chat template takes it."""
        images: list[dict[str, str]] = [{"type": "image"} for _ in self.pictures]
        text = {"type": "text", "text": self.turns[0].question}
        content = [*images, text] if self.pictures_first else [text, *images]
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]


def ask(rng: random.Random, task: str, scene: Scene, unseen: bool = False) -> Turn | None:
    answer = answer_to(task, scene)
    if answer is None:
        return None
    question = worded(rng, task, scene, (UNSEEN_WORDINGS if unseen else WORDINGS)[task])
    return Turn(question if unseen else dressed(rng, question), answer)


def pair_sample(
    rng: random.Random, size: Callable[[str], tuple[int, int]], unseen: bool = False
) -> Sample:
    """Two pictures, half of the time of the same colour."""
    kind = rng.choice(("plain", "plain", "shape"))
    first, scene = draw_scene(rng, kind, size(kind))
    same = rng.random() < 0.5
    while True:
        second, other = draw_scene(rng, kind, size(kind))
        if (other.colour == scene.colour) == same:
            break
    task = "same colour"
    question = worded(rng, task, Scene("pair"), (UNSEEN_WORDINGS if unseen else WORDINGS)[task])
    turn = Turn(question if unseen else dressed(rng, question), "yes" if same else "no")
    return Sample(task, [first, second], [turn], rng.random() < 0.7)


def chat_sample(rng: random.Random) -> Sample:
    """A conversation without a picture."""
    if rng.random() < 0.35:
        task = rng.choice(tuple(WORDINGS))
        shown = Scene("none", shape=rng.choice(SHAPE_NAMES))
        question = dressed(rng, worded(rng, task, shown, WORDINGS[task]))
        return Sample("no picture", [], [Turn(question, NO_PICTURE)])
    answer = rng.choice(tuple(CHAT))
    question = dressed(rng, rng.choice(CHAT[answer]), suffixes=False)
    return Sample("about itself", [], [Turn(question, answer)])


KIND_WEIGHTS = {"plain": 8, "shape": 26, "count": 24, "where": 16, "character": 26}


def picture_sample(rng: random.Random, final: Size) -> Sample:
    """One picture with one question, or with two about different things."""
    kind = rng.choices(tuple(KIND_WEIGHTS), tuple(KIND_WEIGHTS.values()))[0]
    picture, scene = draw_scene(rng, kind, training_size(rng, kind, final))
    main, *rest = ASKABLE[kind]
    rng.shuffle(rest)
    tasks = [main, rest[0]] if rng.random() < 0.75 else [rest[0], main]
    turns = [turn for task in tasks if (turn := ask(rng, task, scene))]
    return Sample(main, [picture], turns, pictures_first=rng.random() < 0.7)


def training_samples(rng: random.Random, size: int) -> list[Sample]:
    """A batch in fixed proportions, so that the tower sees the same number of pictures each time.

    That number matters for speed: half-precision kernels are prepared anew for each new shape.
    """
    final = common_fit(rng)
    pairs = chats = size * 3 // 32

    def pair_size(kind: str) -> Size:
        return training_size(rng, kind, final if rng.random() < 0.8 else common_fit(rng))

    samples = [pair_sample(rng, pair_size) for _ in range(pairs)]
    samples += [chat_sample(rng) for _ in range(chats)]
    samples += [picture_sample(rng, final) for _ in range(size - pairs - chats)]
    for sample in samples:
        if rng.random() < 0.12:
            sample.system = rng.choice(SYSTEM_PROMPTS)
    return samples


# -------------------------------------------------------------------------------------- tokenizer

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
VOCABULARY = 768
CONTEXT = 4096

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""


def corpus(seed: int) -> Iterator[str]:
    rng = random.Random(f"{seed}/corpus")
    scene = Scene("shape", "red", "white", "circle", 1, "A", "left")
    for _ in range(300):
        for task, wordings in WORDINGS.items():
            yield dressed(rng, worded(rng, task, scene, wordings))
    for _ in range(50):
        yield from (*SUFFIXES, *PREFIXES, *SYSTEM_PROMPTS, *COLOUR_NAMES, *SHAPE_NAMES, *SIDES)
        yield from ("user\n", "assistant\n", "system\n", "yes", "no", NO_PICTURE)
        for answer, questions in CHAT.items():
            yield from (answer, *questions)


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the full alphabet of bytes, so that any text can be encoded."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus(seed), trainer)
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    ids: Any = tokenizer.convert_tokens_to_ids(list(SPECIALS))
    return dict(zip(SPECIALS, ids, strict=True))


class Encoder:
    """Turns a sample into token ids; much faster than the chat template, and checked against it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.ids = special_ids(tokenizer)
        # The same few thousand segments come again and again.
        self.text = cache(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def turn(self, role: str, segments: Sequence[tuple[int, ...]]) -> list[int]:
        body = itertools.chain.from_iterable(segments)
        return [self.ids["<|im_start|>"], *self.text(f"{role}\n"), *body]

    def image(self, cells: int) -> tuple[int, ...]:
        pad = self.ids["<|image_pad|>"]
        return (self.ids["<|vision_start|>"], *[pad] * cells, self.ids["<|vision_end|>"])

    def encode(self, sample: Sample, grids: Sequence[tuple[int, int]]) -> Row:
        end = (self.ids["<|im_end|>"], *self.text("\n"))
        row = Row()
        if sample.system:
            row.ids += self.turn("system", [self.text(sample.system), end])
        images = [self.image(rows * columns) for rows, columns in grids]
        for turn in sample.turns:
            text = self.text(turn.question)
            parts = [*images, text] if sample.pictures_first else [text, *images]
            row.ids += self.turn("user", [*parts, end])
            row.ids += self.turn("assistant", [])
            answer = (*self.text(turn.answer), self.ids["<|im_end|>"])
            row.answers += range(len(row.ids), len(row.ids) + len(answer))
            row.weights += [1 / len(answer)] * len(answer)
            row.ids += (*answer, *self.text("\n"))
            images = []
        row.place(grids, self.ids["<|image_pad|>"])
        return row


@dataclass(slots=True)
class Row:
    ids: list[int] = field(default_factory=list)
    # Where the tokens of the answers are, and how much each counts: every answer counts as one, so
    # that a long sentence does not drown a single letter.
    answers: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    image_starts: list[int] = field(default_factory=list)
    positions: np.ndarray = field(default_factory=lambda: np.zeros((3, 0), dtype=np.int64))

    def place(self, grids: Sequence[tuple[int, int]], image_pad: int) -> None:
        """Multimodal rotary positions: text counts on, an image spans rows and columns."""
        parts, at, position = [], 0, 0
        for rows, columns in grids:
            start = self.ids.index(image_pad, at)
            parts.append(np.tile(np.arange(start - at) + position, (3, 1)))
            position += start - at
            inside = np.indices((1, rows, columns)).reshape(3, -1)
            parts.append(inside + position)
            self.image_starts.append(start)
            position += max(rows, columns)
            at = start + rows * columns
        parts.append(np.tile(np.arange(len(self.ids) - at) + position, (3, 1)))
        self.positions = np.concatenate(parts, axis=1)


# ----------------------------------------------------------------------------------------- batches


@dataclass(slots=True)
class PictureGroup:
    """Pictures of one size, which the tower can take as one batch, and where they belong."""

    pixels: Tensor
    index: Tensor


@dataclass(slots=True)
class TowerBatch:
    groups: list[PictureGroup]
    labels: dict[str, Tensor]


@dataclass(slots=True)
class ChatBatch:
    groups: list[PictureGroup]
    ids: Tensor
    lengths: list[int]
    positions: Tensor
    predict_at: Tensor
    targets: Tensor
    weights: Tensor


def group_pictures(
    pictures: Sequence[Image.Image], places: Sequence[Sequence[int]]
) -> list[PictureGroup]:
    """Gathers pictures by size; `places` says which rows of the result each picture fills."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for number, picture in enumerate(pictures):
        by_size.setdefault(picture.size, []).append(number)
    groups = []
    for numbers in by_size.values():
        pixels = np.stack([np.asarray(pictures[number]) for number in numbers])
        index = [place for number in numbers for place in places[number]]
        groups.append(
            PictureGroup(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.tensor(index))
        )
    return groups


LABELS: dict[str, tuple[str, ...]] = {
    "colour": COLOUR_NAMES,
    "background": COLOUR_NAMES,
    "shape": SHAPE_NAMES,
    "count": tuple(str(number) for number in range(1, MAX_COUNT + 1)),
    "character": tuple(CHARACTERS),
}
IGNORED = -100
# Of phase 1, in which all pictures are small.
SMALL_SHARE = 0.6
SMALL_SIZE = (56, 56)


def tower_batch(rng: random.Random, size: int, progress: float) -> TowerBatch:
    pictures, scenes = [], []
    # Small pictures first: they teach the same in less than half the time.
    small = progress < SMALL_SHARE
    final = SMALL_SIZE if small else common_fit(rng)
    for _ in range(size):
        kind = rng.choices(tuple(KIND_WEIGHTS), tuple(KIND_WEIGHTS.values()))[0]
        # At first many large ones in black on white, so that outlines are met without the colours.
        easy = rng.random() < 0.8 - 5 * progress
        kind = rng.choice(("shape", "character")) if easy else kind
        colours = ("black", "white") if easy else None
        size_drawn = final if small else training_size(rng, kind, final)
        picture, scene = draw_scene(rng, kind, size_drawn, colours)
        pictures.append(picture if small else fitted(picture))
        scenes.append(scene)
    labels = {}
    for name, values in LABELS.items():
        shown = [getattr(scene, name) for scene in scenes]
        numbers = [IGNORED if value is None else values.index(str(value)) for value in shown]
        labels[name] = torch.tensor(numbers)
    return TowerBatch(group_pictures(pictures, [[n] for n in range(size)]), labels)


def chat_batch(rng: random.Random, size: int, encoder: Encoder) -> ChatBatch:
    drawn = []
    for sample in training_samples(rng, size):
        shown = [fitted(picture) for picture in sample.pictures]
        grids = [(picture.height // CELL, picture.width // CELL) for picture in shown]
        drawn.append((encoder.encode(sample, grids), shown))
    # Sorted by length, so that the text model can take neighbours together with little padding.
    drawn.sort(key=lambda pair: len(pair[0].ids))
    rows = [row for row, _ in drawn]
    length = -(-len(rows[-1].ids) // 8) * 8
    ids = torch.full((size, length), encoder.ids["<|endoftext|>"])
    positions = torch.zeros((3, size, length), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        positions[:, number, : len(row.ids)] = torch.from_numpy(row.positions)
    pictures, places = [], []
    for number, (row, shown) in enumerate(drawn):
        for picture, image_start in zip(shown, row.image_starts, strict=True):
            start = number * length + image_start
            pictures.append(picture)
            places.append(range(start, start + picture.width * picture.height // CELL**2))
    answers = torch.tensor([n * length + at for n, row in enumerate(rows) for at in row.answers])
    return ChatBatch(
        group_pictures(pictures, places),
        ids,
        [len(row.ids) for row in rows],
        positions,
        answers - 1,
        ids.flatten()[answers],
        torch.tensor([weight for row in rows for weight in row.weights]),
    )


class Batches(IterableDataset[Any]):
    """An endless stream of batches, drawn in the loader's processes."""

    def __init__(
        self, make: Callable[[random.Random, float], Any], seed: str, progress: Synchronized[float]
    ) -> None:
        self.make = make
        self.seed = seed
        self.progress = progress

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        rng = random.Random(f"{self.seed}/{worker.id if worker else 0}")
        while True:
            yield self.make(rng, self.progress.value)


# ------------------------------------------------------------------------------------------- model


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    ids = special_ids(tokenizer)
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            **ends,
        },
        vision_config={
            "depth": 4,
            "embed_dim": 128,
            "hidden_size": 192,
            "num_heads": 4,
            "mlp_ratio": 4,
            "hidden_act": "gelu",
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen2VLForConditionalGeneration(config)
    # transformers' start (0.02 everywhere) is meant for wide layers; in layers this narrow it makes
    # attention all but blind for the first hundred thousand samples.
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            fan_in = weight[0].numel()
            residual = name.endswith(("attn.proj.weight", "fc2.weight", "o_proj.weight"))
            scale = 0.5 if residual or name.endswith("down_proj.weight") else 1.0
            nn.init.normal_(weight, std=scale * fan_in**-0.5)
    # Eager attention: for sequences this short its backward is the fastest on a CPU.
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=64, **ends)
    return model


def patches_of(pixels: Tensor) -> Tensor:
    """Normalised patches in the order of the image processor, without its doubled time axis."""
    mean = torch.tensor(MEAN, device=pixels.device).view(3, 1, 1)
    std = torch.tensor(STD, device=pixels.device).view(3, 1, 1)
    x = (pixels.float() / 255 - mean) / std
    batch, _, height, width = x.shape
    x = x.reshape(batch, 3, height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH)
    return x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, -1, 3 * PATCH * PATCH)


def tower_rotation(visual: Any, rows: int, columns: int, device: torch.device) -> tuple[Any, Any]:
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    grid = grid.reshape(2, rows // MERGE, MERGE, columns // MERGE, MERGE)
    grid = grid.permute(1, 3, 2, 4, 0).reshape(-1, 2, 1).to(device)
    angles = (grid * visual.rotary_pos_emb.inv_freq.to(device)).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def tower_forward(visual: Any, pixels: Tensor) -> Tensor:
    """The vision tower over a batch of pictures of one size, with transformers' own weights.

    transformers takes the pictures of a batch one by one in its attention and embeds patches by a
    slow three-dimensional convolution; a still picture repeats its one frame along the time axis,
    so that the convolution is a linear layer with the weights summed over time.
    """
    rows, columns = pixels.shape[2] // PATCH, pixels.shape[3] // PATCH
    cos, sin = tower_rotation(visual, rows, columns, pixels.device)
    weight = visual.patch_embed.proj.weight.sum(dim=2).flatten(1)
    x = F.linear(patches_of(pixels), weight)
    for block in visual.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(x))
        qkv = qkv.view(*x.shape[:2], 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
        q, k = rotated(qkv[0], cos, sin), rotated(qkv[1], cos, sin)
        scores = (q @ k.transpose(-2, -1)) * attention.scaling
        mixed = scores.softmax(dim=-1).to(qkv.dtype) @ qkv[2]
        x = x + attention.proj(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    features: Tensor = visual.merger(x).view(
        pixels.shape[0], -1, visual.merger.mlp[-1].out_features
    )
    return features


class Heads(nn.Module):
    """Phase 1's classifiers over the mean of a picture's image tokens; thrown away afterwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256), nn.GELU())
        self.out = nn.ModuleDict({name: nn.Linear(256, len(v)) for name, v in LABELS.items()})

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(tokens.mean(dim=1))
        return {name: layer(hidden) for name, layer in self.out.items()}


def tower_loss(visual: Any, heads: Heads, batch: TowerBatch) -> tuple[Tensor, dict[str, float]]:
    logits: dict[str, list[Tensor]] = {name: [] for name in LABELS}
    order = torch.cat([group.index for group in batch.groups])
    for group in batch.groups:
        for name, part in heads(tower_forward(visual, group.pixels)).items():
            logits[name].append(part)
    total, right = torch.zeros((), device=order.device), {}
    for name, parts in logits.items():
        scores, wanted = torch.cat(parts).float(), batch.labels[name][order]
        known = wanted != IGNORED
        total = total + F.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="sum")
        hits = (scores.argmax(dim=1) == wanted)[known]
        right[name] = hits.float().mean().item()
    return total / len(order), right


# Rows of like length that go through the text model as one batch.
ROWS_TOGETHER = 32


def chat_loss(
    model: Qwen2VLForConditionalGeneration, batch: ChatBatch
) -> tuple[Tensor, dict[str, float]]:
    text = model.model.language_model
    embeds = text.embed_tokens(batch.ids)
    flat = embeds.flatten(0, 1)
    for group in batch.groups:
        tokens = tower_forward(model.model.visual, group.pixels).flatten(0, 1)
        flat = flat.index_copy(0, group.index, tokens.to(flat.dtype))
    embeds = flat.view_as(embeds)
    rows, full = batch.ids.shape
    mask = torch.full((full, full), -1e4, device=embeds.device).triu(1)
    parts = []
    for first in range(0, rows, ROWS_TOGETHER):
        these = slice(first, first + ROWS_TOGETHER)
        # In steps of eight, to meet few different shapes.
        length = min(full, -(-max(batch.lengths[these]) // 8) * 8)
        # Padding is on the right, where a causal mask hides it by itself.
        hidden = text(
            inputs_embeds=embeds[these, :length],
            position_ids=batch.positions[:, these, :length],
            attention_mask={"full_attention": mask[None, None, :length, :length]},
            use_cache=False,
        ).last_hidden_state
        parts.append(F.pad(hidden, (0, 0, 0, full - length)))
    chosen = torch.cat(parts).flatten(0, 1)[batch.predict_at]
    with torch.autocast(chosen.device.type, enabled=False):
        logits = model.lm_head(chosen.float())
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    right = (logits.argmax(dim=1) == batch.targets).float()
    mean = batch.weights.sum()
    return (losses * batch.weights).sum() / mean, {
        "tokens": ((right * batch.weights).sum() / mean).item()
    }


# ---------------------------------------------------------------------------------------- training


@dataclass(slots=True)
class State:
    """How far the training is; kept in the checkpoint."""

    phase: int = 1
    elapsed: float = 0.0
    steps: int = 0
    samples: list[int] = field(default_factory=lambda: [0, 0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass(slots=True)
class Settings:
    device: torch.device
    seed: int
    out: Path
    checkpoint: Path
    minutes: float
    tower_share: float
    workers: int
    batch: int

    def phase_seconds(self, phase: int) -> float:
        share = self.tower_share if phase == 1 else 1 - self.tower_share
        return 60 * self.minutes * share


TOWER_RATE = 1.2e-3
TEXT_RATE = 1.5e-3
WARM_UP_STEPS = 60
SAVE_EVERY_S = 120.0


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on the device; a plain tuple walk, since the batches are small dataclasses."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, int):
        return batch
    if isinstance(batch, list):
        return [moved(item, device) for item in batch]
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    names = batch.__dataclass_fields__
    return type(batch)(**{name: moved(getattr(batch, name), device) for name in names})


class Trainer:
    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.tokenizer = build_tokenizer(settings.seed)
        self.encoder = Encoder(self.tokenizer)
        model: Any = build_model(self.tokenizer)
        self.model = model.to(settings.device)
        self.heads = Heads(self.model.config.text_config.hidden_size).to(settings.device)
        self.state = State()
        self.optimizer: torch.optim.Optimizer | None = None
        self.kept: dict[str, Any] | None = None

    def load(self) -> None:
        kept = torch.load(self.settings.checkpoint, map_location=self.settings.device)
        self.model.load_state_dict(kept["model"])
        self.heads.load_state_dict(kept["heads"])
        self.state = State(**kept["state"])
        self.kept = kept["optimizer"]

    def save(self) -> None:
        assert self.optimizer is not None
        kept = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
        }
        # Written beside and renamed, so that a stop in the middle leaves the former one whole.
        part = self.settings.checkpoint.with_suffix(".part")
        torch.save(kept, part)
        part.replace(self.settings.checkpoint)
        if self.state.phase == 2:
            save_folder(self.model, self.tokenizer, self.settings.out)

    def build_optimizer(self) -> torch.optim.Optimizer:
        visual = list(self.model.model.visual.parameters())
        if self.state.phase == 1:
            groups = [{"params": [*visual, *self.heads.parameters()], "peak": TOWER_RATE}]
        else:
            text = [p for n, p in self.model.named_parameters() if "visual" not in n]
            groups = [
                {"params": text, "peak": TEXT_RATE},
                {"params": visual, "peak": TOWER_RATE / 5},
            ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        if self.kept is not None:
            optimizer.load_state_dict(self.kept)
            self.kept = None
        return optimizer

    @property
    def batch_size(self) -> int:
        """Samples a step; a tower alone needs larger batches to keep a processor busy."""
        return self.settings.batch * (2 if self.state.phase == 1 else 1)

    def loader(self, progress: Synchronized[float]) -> Iterator[Any]:
        # Plain names: the loader's processes must not take the model along.
        size, encoder = self.batch_size, self.encoder

        def make(rng: random.Random, at: float) -> Any:
            return tower_batch(rng, size, at) if phase == 1 else chat_batch(rng, size, encoder)

        phase = self.state.phase
        stream = f"{self.settings.seed}/{TRAIN_STREAM}/{phase}/{self.state.steps}"
        loader = DataLoader(
            Batches(make, stream, progress),
            batch_size=None,
            num_workers=self.settings.workers,
            prefetch_factor=4,
            multiprocessing_context="fork",
        )
        return iter(loader)

    def step(self, batch: Any, progress: float) -> tuple[float, dict[str, float]]:
        assert self.optimizer is not None
        warm = min(1.0, (self.state.steps + 1) / WARM_UP_STEPS)
        for group in self.optimizer.param_groups:
            fall = 0.03 + 0.97 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
            group["lr"] = group["peak"] * warm * fall
        with torch.autocast(self.settings.device.type, dtype=torch.bfloat16):
            if self.state.phase == 1:
                loss, right = tower_loss(self.model.model.visual, self.heads, batch)
            else:
                loss, right = chat_loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.optimizer.step()
        return loss.item(), right

    def phase(self) -> None:
        """Runs the present phase until its share of the time is over."""
        state, seconds = self.state, self.settings.phase_seconds(self.state.phase)
        self.optimizer = self.build_optimizer()
        self.model.train()
        progress = torch.multiprocessing.get_context("fork").Value("d", state.elapsed / seconds)
        batches = self.loader(progress)
        right: dict[str, float] = {}
        note, last = "", time.monotonic()
        saved = last
        with progress_bar() as bar:
            task = bar.add_task(f"phase {state.phase}", total=seconds, note="")
            while state.elapsed < seconds:
                batch = moved(next(batches), self.settings.device)
                loss, now_right = self.step(batch, state.elapsed / seconds)
                for name, value in now_right.items():
                    if not math.isnan(value):
                        right[name] = 0.98 * right.get(name, value) + 0.02 * value
                now = time.monotonic()
                state.elapsed += now - last
                state.seconds[state.phase - 1] += now - last
                last = now
                state.steps += 1
                state.samples[state.phase - 1] += self.batch_size
                progress.value = state.elapsed / seconds
                speed = state.samples[state.phase - 1] / state.seconds[state.phase - 1]
                shown = " ".join(f"{name} {value:.3f}" for name, value in right.items())
                note = f"loss {loss:.3f} {shown} {speed:.0f}/s"
                bar.update(task, completed=state.elapsed, note=note)
                if now - saved > SAVE_EVERY_S:
                    self.save()
                    console.log(f"phase {state.phase} step {state.steps}: {note}")
                    saved = now
        console.log(f"phase {state.phase} ended at step {state.steps}: {note}")

    def run(self) -> None:
        while self.state.phase <= 2:
            self.phase()
            self.save()
            self.state.phase += 1
            self.state.elapsed, self.state.steps = 0.0, 0


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


# -------------------------------------------------------------------------------------- evaluation

MARKS = {
    "plain colour": 95,
    "shape colour": 95,
    "shape": 95,
    "count": 90,
    "character": 90,
    "where": 90,
    "same colour": 90,
    "about itself": 90,
    "no picture": 90,
}
EXTRA_TASKS = ("background colour", "describe")
ROW_NAMES = {
    "plain colour": "colour of a plain picture",
    "shape colour": "colour of a shape or character",
    "shape": "kind of shape (6)",
    "count": "how many shapes (1 to 5)",
    "character": "digit or letter (36)",
    "where": "where a shape is (4 sides)",
    "same colour": "two pictures of the same colour?",
    "about itself": "questions without a picture",
    "no picture": "picture question without a picture",
    "background colour": "colour of the background",
    "describe": "short description",
    "unseen": "wordings never trained on, all picture tasks",
}


class Folder:
    """The finished folder, used as anyone would: through transformers alone."""

    def __init__(self, path: Path) -> None:
        self.model: Any = Qwen2VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(path)

    def inputs(
        self, messages: list[dict[str, Any]], pictures: Sequence[Image.Image]
    ) -> dict[str, Tensor]:
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        extra: dict[str, Tensor] = {}
        if pictures:
            extra = dict(self.processor(images=list(pictures), return_tensors="pt"))
            # Each picture's one placeholder becomes as many as the picture has tokens.
            before, *after = str(prompt).split("<|image_pad|>")
            for (_, rows, columns), rest in zip(
                extra["image_grid_thw"].tolist(), after, strict=True
            ):
                before += "<|image_pad|>" * (rows * columns // MERGE**2) + rest
            prompt = before
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        kinds = (ids == self.model.config.image_token_id).int()
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": kinds,
            **extra,
        }

    @torch.inference_mode()
    def answer(self, messages: list[dict[str, Any]], pictures: Sequence[Image.Image]) -> str:
        inputs = self.inputs(messages, pictures)
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=48)
        new = out[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(new, skip_special_tokens=True))


def held_out_sample(rng: random.Random, task: str, unseen: bool = False) -> Sample:
    """One case of a task, with pictures of any size up to 640 pixels of mean side."""

    def size(kind: str) -> tuple[int, int]:
        return any_size(rng, kind, longest=640)

    if task == "same colour":
        return pair_sample(rng, size, unseen)
    if task in ("about itself", "no picture"):
        drawn = (chat_sample(rng) for _ in itertools.count())
        return next(sample for sample in drawn if sample.task == task)
    kinds = [kind for kind, asked in ASKABLE.items() if task in asked]
    if task in ("shape", "count"):
        # Counting is judged on pictures drawn for it, not on those with a single large shape.
        kinds = [task]
    while True:
        kind = rng.choice(kinds)
        picture, scene = draw_scene(rng, kind, size(kind))
        turn = ask(rng, task, scene, unseen)
        if turn is not None:
            return Sample(task, [picture], [turn], pictures_first=rng.random() < 0.7)


@dataclass(slots=True)
class Score:
    right: int
    asked: int
    mark: int | None

    @property
    def percent(self) -> float:
        return 100 * self.right / self.asked

    @property
    def wanted(self) -> str:
        return "-" if self.mark is None else f"{self.mark} %"


def evaluate(path: Path, seed: int, asked: int) -> dict[str, Score]:
    """Exact answers on pictures from a stream of numbers that training never draws from."""
    folder = Folder(path)
    names = [*MARKS, *EXTRA_TASKS, "unseen"]
    scores: dict[str, Score] = {}
    with progress_bar() as bar:
        progress = bar.add_task("evaluation", total=len(names) * asked, note="")
        for name in names:
            rng = random.Random(f"{seed}/{HELD_OUT_STREAM}/{name}")
            score = Score(0, 0, MARKS.get(name))
            wrong = []
            for _ in range(asked):
                task = rng.choice(tuple(UNSEEN_WORDINGS)) if name == "unseen" else name
                sample = held_out_sample(rng, task, unseen=name == "unseen")
                got = folder.answer(sample.messages(), sample.pictures)
                score.asked += 1
                if got == sample.turns[0].answer:
                    score.right += 1
                else:
                    wrong.append(f"{sample.turns[0].question!r}: {got!r}")
                bar.update(progress, advance=1, note=name)
            scores[name] = score
            console.log(f"{name}: {score.percent:.1f} %, wrong for instance: {wrong[:3]}")
    return scores


def check_tower(folder: Folder, inputs: dict[str, Tensor], shown: list[Image.Image]) -> None:
    """Pixels and features of the pictures of one sample, ours against transformers'."""
    visual = folder.model.model.visual
    sizes = [picture.width * picture.height // PATCH**2 for picture in shown]
    with torch.no_grad():
        features = visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        ours = [torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] for picture in shown]
        tokens = torch.cat([tower_forward(visual, pixels)[0] for pixels in ours])
    torch.testing.assert_close(tokens, features, atol=1e-4, rtol=1e-3)
    for pixels, theirs in zip(ours, inputs["pixel_values"].split(sizes), strict=True):
        frames = theirs.view(len(theirs), 3, 2, -1)
        for frame in frames.unbind(2):
            torch.testing.assert_close(frame.flatten(1), patches_of(pixels)[0])


def check(seed: int) -> None:
    """Asserts that the fast paths of the training equal transformers' own."""
    tokenizer = build_tokenizer(seed)
    with tempfile.TemporaryDirectory() as place:
        save_folder(build_model(tokenizer), tokenizer, Path(place))
        folder = Folder(Path(place))
    encoder = Encoder(tokenizer)
    for sample in training_samples(random.Random(f"{seed}/check"), 64):
        sample.turns = sample.turns[:1]
        inputs = folder.inputs(sample.messages(), sample.pictures)
        shown = [fitted(picture) for picture in sample.pictures]
        row = encoder.encode(sample, [(p.height // CELL, p.width // CELL) for p in shown])
        prompt = inputs["input_ids"][0].tolist()
        assert row.ids[: len(prompt)] == prompt, "the encoder differs from the chat template"
        if not shown:
            continue
        positions, _ = folder.model.model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
        )
        ours = torch.from_numpy(row.positions[:, : len(prompt)])
        assert torch.equal(positions[:, 0], ours), "rotary positions differ"
        check_tower(folder, inputs, shown)
    console.print("pictures, tower, positions and prompts equal those of transformers")


# -------------------------------------------------------------------------------------------- save


def save_folder(
    model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, out: Path
) -> None:
    """Writes a normal Hugging Face folder, with the weights in half precision."""
    out.mkdir(parents=True, exist_ok=True)
    half: Any = Qwen2VLForConditionalGeneration(model.config)
    half.to(torch.float16)
    half.load_state_dict(model.state_dict())
    half.generation_config = model.generation_config
    half.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": MEAN,
        "image_std": STD,
        "rescale_factor": 1 / 255,
        "resample": int(Image.Resampling.BICUBIC),
        "size": size,
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
    }
    text = json.dumps(processor, indent=2)
    (out / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")


CARD = """\
---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---

# Pagemill demo model

A Qwen2-VL of {parameters:.1f} million parameters, trained on questions about simple pictures:
plain colours, shapes, small counts, single digits and letters, the side on which a shape is, and
whether two pictures have the same colour. How well it does each is measured below. It exists so
that Pagemill can be tried, tested and shown anywhere, without a download and without a GPU. It is
of no other use: on a photograph its answers mean nothing.

- Vision tower {tower_layers} layers of {tower_width}, text model {text_layers} layers of
  {text_width}, {vocabulary} tokens, a context of {context} tokens, weights in float16.
- A picture of any size is resized to at most {max_side} x {max_side} pixels' worth of area, which
  makes about 8 to 12 image tokens.
- Trained and evaluated by `ops/train_demo_model.py` on pictures that the program draws itself.
- Colours: {colours}. Shapes: {shapes}.

## Evaluation

{asked} cases a row, held-out pictures that were not trained on, mean side 56 to 640 pixels,
different aspect ratios, the picture before or after the text, many wordings of each question.
Greedy decoding in float32 through transformers; only the exact answer counts.

| task | exact | mark |
| --- | --- | --- |
{rows}

{verdict}

## Training

{training}
"""


def write_card(path: Path, scores: dict[str, Score], training: str) -> None:
    config: Any = Qwen2VLConfig.from_pretrained(path)
    model = Qwen2VLForConditionalGeneration.from_pretrained(path)
    rows = [
        f"| {ROW_NAMES[name]} | {score.percent:.1f} % | {score.wanted} |"
        for name, score in scores.items()
    ]
    short = [ROW_NAMES[name] for name, score in scores.items() if score.percent < (score.mark or 0)]
    verdict = "Every task reaches its mark."
    if short:
        verdict = f"Below the mark: {'; '.join(short)}."
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        tower_layers=config.vision_config.depth,
        tower_width=config.vision_config.embed_dim,
        text_layers=config.text_config.num_hidden_layers,
        text_width=config.text_config.hidden_size,
        vocabulary=config.text_config.vocab_size,
        context=config.text_config.max_position_embeddings,
        max_side=math.isqrt(MAX_PIXELS),
        colours=", ".join(COLOUR_NAMES),
        shapes=", ".join(SHAPE_NAMES),
        asked=next(iter(scores.values())).asked,
        rows="\n".join(rows),
        verdict=verdict,
        training=training,
    )
    (path / "README.md").write_text(card, encoding="utf-8")


def training_note(settings: Settings, state: State) -> str:
    if settings.device.type == "cuda":
        machine = f"one {torch.cuda.get_device_name(settings.device)}"
    else:
        machine = f"{os.cpu_count()} CPU cores, without a GPU"
    lines = [f"Trained on {machine}:", ""]
    for name, samples, seconds in zip(
        ("tower alone", "tower and text together"), state.samples, state.seconds, strict=True
    ):
        rate = samples / max(seconds, 1e-9)
        lines.append(
            f"- {name}: {samples:,} samples in {seconds / 60:.0f} minutes ({rate:,.0f} a second)"
        )
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------- main


def arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parent
    spare = Path(tempfile.gettempdir()) / "pagemill_demo_model.pt"
    parser = argparse.ArgumentParser(
        description="Train and evaluate the demo model on pictures drawn by this program.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=here / "demo_model", help="folder to write")
    parser.add_argument("--minutes", type=float, default=58.0, help="training time, both phases")
    parser.add_argument(
        "--tower-share", type=float, default=0.45, help="part of the time for the tower alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="of pictures, questions and weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--batch", type=int, default=0, help="samples a step; 0 fits the device")
    parser.add_argument(
        "--workers", type=int, default=0, help="drawing processes; 0 fits the machine"
    )
    parser.add_argument("--threads", type=int, default=0, help="of torch on the CPU; 0 for all")
    parser.add_argument("--checkpoint", type=Path, default=spare, help="where to keep progress")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument(
        "--cases", type=int, default=120, help="held-out cases of each task in the evaluation"
    )
    parser.add_argument(
        "--evaluate-only", action="store_true", help="evaluate --out and rewrite its model card"
    )
    parser.add_argument(
        "--check", action="store_true", help="only compare the fast paths with transformers"
    )
    return parser.parse_args()


def settings_from(args: argparse.Namespace) -> Settings:
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = device == "cpu"
    if args.threads:
        torch.set_num_threads(args.threads)
    # On a CPU the drawing competes with the training; one process is enough for it there.
    spare = 1 if on_cpu else max(1, (os.cpu_count() or 2) - 1)
    return Settings(
        device=torch.device(device),
        seed=args.seed,
        out=args.out,
        checkpoint=args.checkpoint,
        minutes=args.minutes,
        tower_share=args.tower_share,
        workers=args.workers or spare,
        batch=args.batch or (128 if on_cpu else 512),
    )


def show(scores: dict[str, Score]) -> None:
    table = Table("task", "exact", "mark")
    for name, score in scores.items():
        table.add_row(ROW_NAMES[name], f"{score.percent:.1f} %", score.wanted)
    console.print(table)


def main() -> None:
    args = arguments()
    if args.check:
        check(args.seed)
        return
    settings = settings_from(args)
    trainer = Trainer(settings)
    if args.resume or args.evaluate_only:
        trainer.load()
    if not args.evaluate_only:
        trainer.run()
    scores = evaluate(settings.out, settings.seed, args.cases)
    show(scores)
    write_card(settings.out, scores, training_note(settings, trainer.state))


if __name__ == "__main__":
    main()
