"""Training conversations: a scene, questions about it, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ops.demo_training.scenes import SHAPE_NAMES, Scene, Size, common_fit, draw_scene, training_size
from ops.demo_training.wordings import (
    ASKABLE,
    CHAT,
    NO_PICTURE,
    PREFIXES,
    SUFFIXES,
    SYSTEM_PROMPTS,
    UNSEEN_WORDINGS,
    WORDINGS,
)


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
