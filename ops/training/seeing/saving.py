"""The folder of the trained model, in the format of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from ops.training.seeing.scenes import MAX_PIXELS, MEAN, MERGE, MIN_PIXELS, PATCH, STD

FPS = 2.0
MIN_FRAMES, MAX_FRAMES = 4, 8


def save_checkpoint(kept: dict[str, Any], file: Path) -> None:
    """Write a checkpoint beside the file and rename it: a stop in the middle leaves the old one."""
    part = file.with_suffix(".part")
    torch.save(kept, part)
    part.replace(file)


def save_half(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model, or other weights of it, and its tokenizer in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    half: Any = type(model)(model.config)
    half.to(torch.float16)
    half.load_state_dict(model.state_dict() if weights is None else weights)
    half.generation_config = model.generation_config
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_folder(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a normal Hugging Face folder, with the weights in half precision."""
    save_half(model, tokenizer, out, weights)
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
    _write(out / "preprocessor_config.json", processor)
    video = {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "do_sample_frames": True,
        "fps": FPS,
        "min_frames": MIN_FRAMES,
        "max_frames": MAX_FRAMES,
    }
    del processor["image_processor_type"]
    _write(out / "video_preprocessor_config.json", processor | video)


def _write(file: Path, settings: dict[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
