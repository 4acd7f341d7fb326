"""All answers of the demo model, taken from the scenes that it was trained on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ops.training.seeing.samples import answer_to
from ops.training.seeing.scenes import (
    CHARACTERS,
    COLOUR_NAMES,
    MAX_COUNT,
    SHAPE_NAMES,
    SIDES,
    Scene,
)
from ops.training.seeing.wordings import ASKABLE, NO_PICTURE, WORDINGS

Kind = Literal["short", "sentence", "description"]
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """One text that the voice speaks."""

    text: str
    kind: Kind

    @property
    def is_held_out(self) -> bool:
        """Whether the talker never hears it in training: a tenth of the descriptions."""
        if self.kind != "description":
            return False
        first = hashlib.sha256(self.text.encode()).digest()[0]
        return first < HELD_OUT_SHARE * 256


def scenes() -> Iterator[Scene]:
    """Yield every scene that a picture can show, as far as its answers differ."""
    for colour in COLOUR_NAMES:
        yield Scene("plain", colour)
        for character in CHARACTERS:
            yield Scene("character", colour, character=character)
    for colour, background in itertools.permutations(COLOUR_NAMES, 2):
        for shape, count in itertools.product(SHAPE_NAMES, range(1, MAX_COUNT + 1)):
            yield Scene("count", colour, background, shape, count)
    for shape, side in itertools.product(SHAPE_NAMES, SIDES):
        yield Scene("where", COLOUR_NAMES[0], COLOUR_NAMES[1], shape, 1, side=side)


def answers() -> list[Answer]:
    """The distinct answers: single words and characters, then sentences, then descriptions."""
    short: dict[str, None] = {"yes": None, "no": None}
    descriptions: dict[str, None] = {}
    for scene in scenes():
        for task in ASKABLE[scene.kind]:
            text = answer_to(task, scene)
            if text is not None:
                (descriptions if task == "describe" else short)[text] = None
    sentences = (*WORDINGS.chat_answers.values(), NO_PICTURE)
    return [
        *(Answer(text, "short") for text in short),
        *(Answer(text, "sentence") for text in sentences),
        *(Answer(text, "description") for text in descriptions),
    ]
