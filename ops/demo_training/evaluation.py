"""Scores on pictures and questions that training never sees."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ops.demo_training.model import build_model, patches_of, tower_forward
from ops.demo_training.samples import Sample, ask, chat_sample, pair_sample, training_samples
from ops.demo_training.saving import save_folder
from ops.demo_training.scenes import (
    CELL,
    HELD_OUT_STREAM,
    MERGE,
    PATCH,
    any_size,
    console,
    draw_scene,
    fitted,
)
from ops.demo_training.tokenizer import Encoder, build_tokenizer
from ops.demo_training.trainer import progress_bar
from ops.demo_training.wordings import ASKABLE, UNSEEN_WORDINGS

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
