"""The tokenizer and the chat template of the demo model, and encoded conversations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ops.demo_training.samples import Sample, dressed, worded
from ops.demo_training.scenes import COLOUR_NAMES, SHAPE_NAMES, SIDES, Scene
from ops.demo_training.wordings import (
    CHAT,
    NO_PICTURE,
    PREFIXES,
    SUFFIXES,
    SYSTEM_PROMPTS,
    WORDINGS,
)

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
