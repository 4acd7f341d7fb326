"""The judged model: a folder, read by transformers, with positions by the rule of its training."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ops.training.judge.cases import Case, Question
from ops.training.judge.questions import Tool

MAX_NEW = 64
FRAMES_PER_SECOND, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 8


class Answerer:
    """Answers questions greedily in float32."""

    def __init__(self, folder: Path) -> None:
        model: Any = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        config = model.config
        self._pads = {"image": config.image_token_id, "video": config.video_token_id}
        self._case: Case | None = None
        self._media: list[tuple[Tensor, tuple[int, int, int]]] = []
        self._ends = {model.generation_config.eos_token_id}

    def judge(self, question: Question) -> tuple[bool, str]:
        """Return whether the answer and a tool call before it are right, and the answer."""
        case = question.case
        content: list[dict[str, str]] = [{"type": case.media} for _ in case.files]
        content.append({"type": "text", "text": question.text})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        tools = [definition(tool) for tool in case.tools]
        answer = self.say(messages, question, tools)
        if case.call is None:
            return answer == question.answer, answer
        call = parse_call(answer)
        if call != case.call:
            return False, answer
        function = {"name": call[0], "arguments": call[1]}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        )
        messages.append({"role": "tool", "content": question.answer})
        answer = self.say(messages, question, tools)
        return answer == question.answer, answer

    def say(self, messages: list[dict[str, Any]], question: Question, tools: list[Any]) -> str:
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=True
                )
            )
        except (TypeError, ValueError):
            return ""
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        pad = self._pads[question.case.media]
        if ids.count(pad) != len(question.case.files):
            # An older template, without clips.
            return ""
        with torch.inference_mode():
            if self._case is not question.case:
                # The same media are asked about several times.
                self._case = question.case
                self._media = [self._see(file, question.case.media) for file in question.case.files]
            return self._decode(ids, pad, self._media)

    def _see(self, file: bytes, medium: str) -> tuple[Tensor, tuple[int, int, int]]:
        """The features of an image or a clip, and its grid of tokens."""
        picture = Image.open(io.BytesIO(file))
        still = medium == "image"
        frames = [picture.convert("RGB")] if still else sampled_frames(picture)
        rows = [self._processor(images=[frame], return_tensors="pt") for frame in frames]
        _, height, width = (int(n) for n in rows[0]["image_grid_thw"][0])
        pixels = [row["pixel_values"] for row in rows]
        if medium == "video":
            # The processor doubles a still frame; here two frames stand in the place of one.
            first = [p.unflatten(1, (3, 2, -1))[:, :, 0] for p in pixels]
            pairs = [torch.stack(pair, 2) for pair in zip(first[::2], first[1::2], strict=True)]
            pixels = [pair.flatten(1) for pair in pairs]
        grid = torch.tensor([[len(pixels), height, width]])
        visual = self._model.model.visual
        features: Tensor = visual(torch.cat(pixels), grid_thw=grid).pooler_output
        merge = self._model.config.vision_config.spatial_merge_size
        return features, (len(pixels), height // merge, width // merge)

    def _decode(
        self, ids: list[int], pad: int, media: list[tuple[Tensor, tuple[int, int, int]]]
    ) -> str:
        grids = iter([grid for _, grid in media])
        full: list[int] = []
        parts: list[np.ndarray] = []
        position = 0
        for token in ids:
            if token == pad:
                grid = next(grids)
                full += [pad] * math.prod(grid)
                parts.append(np.indices(grid).reshape(3, -1) + position)
                position += max(grid)
            else:
                full.append(token)
                parts.append(np.full((3, 1), position))
                position += 1
        embeds = self._model.get_input_embeddings()(torch.tensor([full]))
        if media:
            embeds[0, torch.tensor(full) == pad] = torch.cat([features for features, _ in media])
        places = torch.from_numpy(np.concatenate(parts, axis=1))[:, None]
        text, cache = self._model.model.language_model, None
        new: list[int] = []
        while True:
            out = text(
                inputs_embeds=embeds, position_ids=places, past_key_values=cache, use_cache=True
            )
            token = int(self._model.lm_head(out.last_hidden_state[:, -1]).argmax())
            if token in self._ends or len(new) == MAX_NEW:
                return str(self._tokenizer.decode(new, skip_special_tokens=True))
            new.append(token)
            cache = out.past_key_values
            embeds = self._model.get_input_embeddings()(torch.tensor([[token]]))
            places = torch.full((3, 1, 1), position + len(new) - 1)


def sampled_frames(clip: Image.Image) -> list[Image.Image]:
    """Two frames a second, an even number of them, by the rule of the family."""
    frames, seconds = [], 0.0
    for frame in ImageSequence.Iterator(clip):
        frames.append(frame.convert("RGB"))
        seconds += float(frame.info["duration"]) / 1000
    total = len(frames)
    most = min(max(seconds * FRAMES_PER_SECOND, MIN_FRAMES), MAX_FRAMES, total // 2 * 2)
    num = int(most // 2 * 2)
    step = total / num
    return [frames[min(int(n * step), total - 1)] for n in range(num)]


def definition(tool: Tool) -> dict[str, Any]:
    name, arguments, description = tool
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def parse_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """The one call in hermes' format that an answer consists of."""
    inner = text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    if len(inner) + len("<tool_call></tool_call>") != len(text.strip()):
        return None
    try:
        call = json.loads(inner)
        return call["name"], call["arguments"]
    except (KeyError, TypeError, ValueError):
        return None
