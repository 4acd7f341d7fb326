"""The trained model in transformers, and a check that the training computes the same."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ops.training.seeing.batches import EncodedSample, collated, encoded
from ops.training.seeing.model import answer_states, build_model, patches_of, tower_forward
from ops.training.seeing.samples import Sample, training_samples
from ops.training.seeing.scenes import MERGE, PATCH
from ops.training.seeing.task import save_folder
from ops.training.seeing.tokenizer import Encoder, load_tokenizer
from ops.training.trainer import console
from shared.models.mrope import GridRun, locate_grids


class Folder:
    """The finished folder, used through transformers alone."""

    def __init__(self, path: Path) -> None:
        self.model: Any = Qwen2VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(path)

    def inputs(
        self,
        messages: list[dict[str, Any]],
        pictures: Sequence[Image.Image],
        tools: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Tensor]:
        prompt = self.tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
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


def check_tower(folder: Folder, inputs: dict[str, Tensor], pictures: list[Image.Image]) -> None:
    """Compare the pixels and features of one sample's pictures with transformers."""
    visual = folder.model.model.visual
    sizes = [picture.width * picture.height // PATCH**2 for picture in pictures]
    with torch.no_grad():
        features = visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        ours = [torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] for picture in pictures]
        tokens = torch.cat([tower_forward(visual, pixels)[0] for pixels in ours])
    torch.testing.assert_close(tokens, features, atol=1e-4, rtol=1e-3)
    for pixels, theirs in zip(ours, inputs["pixel_values"].split(sizes), strict=True):
        frames = theirs.view(len(theirs), 3, 2, -1)
        for frame in frames.unbind(2):
            torch.testing.assert_close(frame.flatten(1), patches_of(pixels)[0])


@torch.no_grad()
def check(path: Path, num_samples: int = 64) -> None:
    """Asserts that the fast paths of the training equal transformers' own."""
    tokenizer = load_tokenizer(path)
    with tempfile.TemporaryDirectory() as place:
        save_folder(build_model(tokenizer), tokenizer, Path(place))
        folder = Folder(Path(place))
    encoder = Encoder(tokenizer)
    for sample in training_samples(random.Random("check"), num_samples):
        tools = [tool.definition() for tool in sample.tools]
        sample.turns, sample.apart = sample.turns[:1], False
        item = encoded(sample, encoder)
        states = answer_states(folder.model, collated([item], encoder))
        if sample.clip:
            check_clip(folder, sample, item)
            continue
        inputs = folder.inputs(sample.messages(), sample.pictures, tools)
        prompt = inputs["input_ids"][0].tolist()
        assert item.row.ids[: len(prompt)] == prompt, "the encoder differs from the chat template"
        theirs = folder.model(**inputs).logits[0, -1]
        torch.testing.assert_close(folder.model.lm_head(states[0]), theirs, atol=1e-3, rtol=1e-3)
        if not item.pictures:
            continue
        positions, _ = folder.model.model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
        )
        ours = torch.from_numpy(item.row.positions[:, : len(prompt)])
        assert torch.equal(positions[:, 0], ours), "rotary positions differ"
        check_tower(folder, inputs, item.pictures)
    console.print("pictures, clips, tower, text, positions and prompts are as in transformers")


def check_clip(folder: Folder, sample: Sample, item: EncodedSample) -> None:
    """Check the prompt, positions and features of a clip.

    The positions are compared with the product. transformers 5 computes others for the text after a
    clip: it ignores the length of the clip in time, unlike the training.
    """
    prompt = str(
        folder.tokenizer.apply_chat_template(
            sample.messages(), tokenize=False, add_generation_prompt=True
        )
    )
    assert item.pairs is not None
    pairs = torch.from_numpy(item.pairs).permute(0, 1, 4, 2, 3)
    grid = (len(pairs), pairs.shape[-2] // PATCH, pairs.shape[-1] // PATCH)
    tokens = math.prod(grid) // MERGE**2
    prompt = prompt.replace("<|video_pad|>", "<|video_pad|>" * tokens)
    ids = folder.tokenizer(prompt, add_special_tokens=False).input_ids
    assert item.row.ids[: len(ids)] == ids, "the encoder differs from the chat template"
    start, (num, height, width) = item.row.media_starts[0], grid
    run = GridRun(start, num, height // MERGE, width // MERGE)
    located = locate_grids(len(ids), [run]).prompt
    assert torch.equal(torch.from_numpy(item.row.positions[:, : len(ids)]), located)
    visual = folder.model.model.visual
    with torch.no_grad():
        theirs = visual(patches_of(pairs).flatten(0, 1), torch.tensor([grid])).pooler_output
        ours = tower_forward(visual, pairs).flatten(0, 1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
