"""Cases of the judge: media, questions about them, and the only right answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ops.training.judge.drawing import (
    FONTS,
    SHAPES,
    Field,
    Look,
    Random,
    put_letter,
    put_shape,
    surface,
    to_clip,
    to_file,
    tone,
    two_names,
)
from ops.training.judge.questions import QUESTIONS, Tool

ADD_TOOLS, LOOKUP_TOOLS = QUESTIONS.add_tools, QUESTIONS.lookup_tools
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SIDES = {"left": (0.16, 0.5), "right": (0.84, 0.5), "top": (0.5, 0.16), "bottom": (0.5, 0.84)}
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


@dataclass(slots=True)
class Case:
    """One medium or several, and the answers to questions of several kinds about them."""

    files: list[bytes]
    answers: dict[str, str]
    media: Literal["image", "video"] = "image"
    tools: list[Tool] = field(default_factory=list)
    call: tuple[str, dict[str, Any]] | None = None
    """The function that has to be called first; its result is the answer."""
    place: int = 0
    """The question's place in the tables, where the answer depends on it."""


def any_size(rng: Random) -> tuple[int, int]:
    """Width and height, from 40 to 400 pixels each."""
    side = float(np.exp(rng.uniform(np.log(56), np.log(310))))
    ratio = float(rng.choice((1.0, 1.0, 1.33, 0.75, 1.6, 0.625)))
    width, height = side * ratio**0.5, side / ratio**0.5
    return int(np.clip(round(width), 40, 400)), int(np.clip(round(height), 40, 400))


def plain_case(rng: Random, number: int) -> Case:
    name = two_names(rng)[0]
    return Case([to_file(rng, surface(rng, name, *any_size(rng)))], {"plain": name})


def shape_case(rng: Random, number: int) -> Case:
    colour, background = two_names(rng)
    width, height = any_size(rng)
    shape = SHAPES[number % len(SHAPES)]
    canvas, short = surface(rng, background, width, height), min(width, height)
    radius = float(rng.uniform(0.22, 0.45)) * short
    x, y = (float(rng.uniform(radius, length - radius)) for length in (width, height))
    put_shape(canvas, shape, (x, y, radius), tone(rng, colour), Look(rng))
    answers = {"shape": shape, "colour": colour, "background": background}
    return Case(
        [to_file(rng, canvas)], answers | {"describe": f"a {colour} {shape} on {background}"}
    )


def counted(rng: Random, count: int, size: tuple[int, int]) -> Field:
    """Draw `count` shapes. In some pictures they have several kinds."""
    width, height = size
    colour, background = two_names(rng)
    canvas, look = surface(rng, background, width, height), Look(rng)
    paint, shape, mixed = tone(rng, colour), str(rng.choice(SHAPES)), rng.random() < 0.25
    radius, tries = float(rng.uniform(0.12, 0.2)) * min(size), 0
    spots: list[tuple[float, float]] = []
    while len(spots) < count:
        spot = (
            float(rng.uniform(radius, width - radius)),
            float(rng.uniform(radius, height - radius)),
        )
        if all(np.hypot(spot[0] - x, spot[1] - y) > 2.3 * radius for x, y in spots):
            spots.append(spot)
        tries += 1
        if tries % 30 == 0:
            spots, radius = [], radius * 0.9
    for x, y in spots:
        kind = str(rng.choice(SHAPES)) if mixed else shape
        put_shape(canvas, kind, (x, y, radius), paint, look)
    return canvas


def count_case(rng: Random, number: int) -> Case:
    count = number % 5 + 1
    return Case([to_file(rng, counted(rng, count, any_size(rng)))], {"count": str(count)})


def lettered(rng: Random, character: str) -> Field:
    colour, background = two_names(rng)
    width, height = any_size(rng)
    canvas = surface(rng, background, width, height)
    tall = float(rng.uniform(0.5, 0.85)) * min(width, height)
    x = width * float(rng.uniform(0.4, 0.6))
    y = height / 2 + (height - tall) * float(rng.uniform(-0.4, 0.4))
    put_letter(canvas, character, str(rng.choice(FONTS)), (x, y, tall), tone(rng, colour))
    return canvas


def character_case(rng: Random, number: int) -> Case:
    character = CHARACTERS[number % len(CHARACTERS)]
    return Case([to_file(rng, lettered(rng, character))], {"character": character})


def where_case(rng: Random, number: int) -> Case:
    colour, background = two_names(rng)
    width, height = any_size(rng)
    side = list(SIDES)[number % len(SIDES)]
    canvas = surface(rng, background, width, height)
    u, v = (middle + float(rng.uniform(-0.09, 0.09)) for middle in SIDES[side])
    radius = float(rng.uniform(0.1, 0.17)) * min(width, height)
    x, y = (
        float(np.clip(share * length, radius, length - radius))
        for share, length in ((u, width), (v, height))
    )
    put_shape(canvas, str(rng.choice(SHAPES)), (x, y, radius), tone(rng, colour), Look(rng))
    return Case([to_file(rng, canvas)], {"where": side})


def same_case(rng: Random, number: int) -> Case:
    first, other = two_names(rng)
    second = first if number % 2 else other
    files = [to_file(rng, surface(rng, name, *any_size(rng))) for name in (first, second)]
    return Case(files, {"same": "yes" if number % 2 else "no"})


def chat_case(rng: Random, number: int) -> Case:
    place = number % len(QUESTIONS.chat_answers)
    return Case([], {"chat": QUESTIONS.chat_answers[place]}, place=place)


def nothing_case(rng: Random, number: int) -> Case:
    return Case([], {"nothing": QUESTIONS.nothing_shown})


def clip_case(rng: Random, number: int) -> Case:
    """A clip of one to three seconds of a shape that moves, changes its size, or its colour."""
    colour, background = two_names(rng)
    kind = ("motion", "motion", "change", "last")[number % 4]
    num = int(rng.integers(8, 25))
    width, height = (int(rng.integers(60, 200)) for _ in range(2))
    short, look, shape = min(width, height), Look(rng), str(rng.choice(SHAPES))
    ground, paint = surface(rng, background, width, height), tone(rng, colour)
    times, radius = np.linspace(0, 1, num), float(rng.uniform(0.12, 0.22)) * short
    radii, middle = np.full(num, radius), np.array([width, height]) / 2
    path = np.zeros((num, 2)) + middle + rng.uniform(-0.12, 0.12, 2) * short
    answers, paints = {}, [paint] * num
    if kind == "motion":
        way = list(WAYS)[number // 4 % 2 * 2 + number % 4]
        reach = (middle - radius) * float(rng.uniform(0.45, 0.95))
        path = path + np.outer(2 * times - 1, np.array(WAYS[way]) * reach)
        answers = {"motion": way}
    elif kind == "change":
        ratio, grows = float(rng.uniform(1.6, 2.6)), number // 4 % 2 == 0
        steps = 0.13 * short * (1 + (ratio - 1) * times)
        radii, answers = (
            (steps, {"change": "grows"}) if grows else (steps[::-1], {"change": "shrinks"})
        )
    else:
        last = next(n for n in iter(lambda: two_names(rng)[0], "") if n not in (colour, background))
        # A small drift, since files leave frames out that show nothing new.
        path = path + np.outer(np.arange(num), rng.choice([-1.0, 1.0], 2))
        end, switch = tone(rng, last), int(num * rng.uniform(0.3, 0.6))
        paints, answers = [paint] * switch + [end] * (num - switch), {"last": last}
    frames = []
    for (x, y), radius, own in zip(path, radii, paints, strict=True):
        frame = ground.copy()
        put_shape(frame, shape, (float(x), float(y), float(radius)), own, look)
        frames.append(frame)
    return Case([to_clip(frames, 100)], answers, "video")


def add_case(rng: Random, number: int) -> Case:
    counts = [int(n) for n in rng.integers(1, 6, 2)]
    files = [to_file(rng, counted(rng, count, any_size(rng))) for count in counts]
    tool, other = (
        ADD_TOOLS[number % len(ADD_TOOLS)],
        LOOKUP_TOOLS[number // 2 % 5],
    )
    call = (tool[0], dict(zip(tool[1], counts, strict=True)))
    return Case(files, {"add": str(sum(counts))}, tools=tools_of(number, tool, other), call=call)


def lookup_case(rng: Random, number: int) -> Case:
    character = CHARACTERS[int(rng.integers(len(CHARACTERS)))]
    tool, other = (
        LOOKUP_TOOLS[number % len(LOOKUP_TOOLS)],
        ADD_TOOLS[number // 2 % 5],
    )
    call = (tool[0], {tool[1][0]: character})
    answer = {"lookup": str(rng.choice(QUESTIONS.people))}
    return Case(
        [to_file(rng, lettered(rng, character))],
        answer,
        tools=tools_of(number, tool, other),
        call=call,
    )


def no_call_case(rng: Random, number: int) -> Case:
    """Tools are offered, and the question needs none."""
    case = (shape_case, count_case, where_case)[number % 3](rng, number)
    case.tools = [ADD_TOOLS[number % 5], LOOKUP_TOOLS[number % 4]][: 1 + number % 2]
    return case


def tools_of(number: int, needed: Tool, other: Tool) -> list[Tool]:
    return [[needed], [needed, other], [other, needed]][number % 3]


Maker = Callable[[Random, int], Case]
# Number of cases of each kind. The first five kinds have 444 images together.
MAKERS: dict[str, tuple[int, Maker]] = {
    "plain": (48, plain_case),
    "shape": (120, shape_case),
    "count": (100, count_case),
    "character": (108, character_case),
    "where": (68, where_case),
    "same": (48, same_case),
    "chat": (25, chat_case),
    "nothing": (24, nothing_case),
    "clip": (120, clip_case),
    "add": (45, add_case),
    "lookup": (45, lookup_case),
    "no call": (60, no_call_case),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question of one row of the table."""

    row: str
    is_seen: bool
    """Whether the training has this wording too."""
    text: str
    answer: str
    case: Case


def questions_of(kind: str, seed: int, share: float = 1.0) -> Iterator[Question]:
    """Yield the questions of all cases of a kind, each in a seen and in an unseen wording."""
    num, maker = MAKERS[kind]
    for number in range(max(1, round(num * share))):
        rng = np.random.default_rng([seed, list(MAKERS).index(kind), number])
        case = maker(rng, number)
        for name, answer in case.answers.items():
            if kind == "no call" and name == "describe":
                continue
            for is_seen in (True, False):
                table = QUESTIONS.seen_wordings if is_seen else QUESTIONS.unseen_wordings
                choice = case.place if kind == "chat" else int(rng.integers(len(table[name])))
                row = kind if kind == "no call" else name
                yield Question(row, is_seen, table[name][choice], answer, case)
