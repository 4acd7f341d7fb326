"""The tokenizer and the chat template of the demo model, and encoded conversations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ops.training.folders import SEEING
from ops.training.seeing.samples import Sample

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
VOCABULARY = 768
CONTEXT = 4096

# Tools are listed in the system's turn, one a line. Calls are written as Qwen writes them.
CHAT_TEMPLATE = SEEING / "chat_template.jinja"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of the first demo model, which all models of the demo use.

    It is a byte-level BPE with the full alphabet of bytes, so that any text can be encoded. Its
    merges were learned from questions and answers about pictures.
    """
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    assert len(tokenizer) == VOCABULARY
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    ids: Any = tokenizer.convert_tokens_to_ids(list(SPECIALS))
    return dict(zip(SPECIALS, ids, strict=True))


class Encoder:
    """Turns a sample into token ids; much faster than the chat template, and checked against it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.ids = special_ids(tokenizer)
        core = tokenizer.backend_tokenizer
        # The same few thousand segments come again and again.
        self.text = lru_cache(20_000)(
            lambda text: tuple(core.encode(text, add_special_tokens=False).ids)
        )

    def turn(self, role: str, *segments: Sequence[int]) -> list[int]:
        return [self.ids["<|im_start|>"], *self.text(f"{role}\n"), *itertools.chain(*segments)]

    def medium(self, grid: Grid) -> tuple[int, ...]:
        pad = self.ids["<|video_pad|>" if grid[0] > 1 else "<|image_pad|>"]
        run = [pad] * math.prod(grid)
        return (self.ids["<|vision_start|>"], *run, self.ids["<|vision_end|>"])

    def encode(self, sample: Sample, grids: Sequence[Grid]) -> Row:
        """Encode a sample. Each picture has a grid, or the clip: pairs, rows and columns."""
        end = (self.ids["<|im_end|>"], *self.text("\n"))
        row = Row()
        system = sample.system or ""
        if sample.tools:
            lines = "".join(tool.line() for tool in sample.tools)
            system = f"{system}\n" if system else ""
            system += f"<tools>\n{lines}</tools>"
        if system:
            row.add(self.turn("system", self.text(system), end))
        media = [self.medium(grid) for grid in grids]
        if sample.apart:
            row.add(self.turn("user", *media))
        for number, turn in enumerate(sample.turns, 1):
            own = number if sample.apart else 0
            text = self.text(turn.question)
            if sample.apart:
                row.add([*text, *end], own)
            else:
                parts = [*media, text] if sample.pictures_first else [text, *media]
                row.add(self.turn(turn.role, *parts, end), own)
                media = []
            row.add(self.turn("assistant"), own)
            answer = (*self.text(turn.answer), self.ids["<|im_end|>"])
            row.answers += range(len(row.ids), len(row.ids) + len(answer))
            row.weights += [max(1 / len(answer), LEAST_WEIGHT)] * len(answer)
            row.add((*answer, *self.text("\n")), own)
        row.place(grids, self.ids["<|vision_start|>"])
        return row


Grid = tuple[int, int, int]
LEAST_WEIGHT = 0.06


@dataclass(slots=True)
class Row:
    ids: list[int] = field(default_factory=list)
    # All later tokens attend to turn 0. Other turns attend only to themselves and to turn 0.
    turns: list[int] = field(default_factory=list)
    # Places and weights of the tokens of the answers. Every answer has the same weight, so that a
    # long sentence does not outweigh a single letter. Calls have more.
    answers: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    media_starts: list[int] = field(default_factory=list)
    positions: np.ndarray = field(default_factory=lambda: np.zeros((3, 0), dtype=np.int64))

    def add(self, ids: Sequence[int], turn: int = 0) -> None:
        self.ids += ids
        self.turns += [turn] * len(ids)

    def place(self, grids: Sequence[Grid], vision_start: int) -> None:
        """Multimodal rotary positions: text counts up, media span time, rows and columns.

        The text after a medium continues after its largest position. Each separate turn continues
        after the part that it shares with the other turns.
        """
        parts, at, position = [], 0, 0
        for grid in grids:
            start = self.ids.index(vision_start, at) + 1
            parts.append(np.tile(np.arange(start - at) + position, (3, 1)))
            position += start - at
            parts.append(np.indices(grid).reshape(3, -1) + position)
            self.media_starts.append(start)
            position += max(grid)
            at = start + math.prod(grid)
        for _, run in itertools.groupby(self.turns[at:]):
            length = len(list(run))
            parts.append(np.tile(np.arange(length) + position, (3, 1)))
            position += length if self.turns[at] == 0 else 0
            at += length
        self.positions = np.concatenate(parts, axis=1)
