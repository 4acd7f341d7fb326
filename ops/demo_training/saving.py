"""The folder of the trained model, in the format of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from ops.demo_training.scenes import MAX_PIXELS, MEAN, MERGE, MIN_PIXELS, PATCH, STD


def save_half(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model and its tokenizer, with the weights in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    half: Any = type(model)(model.config)
    half.to(torch.float16)
    half.load_state_dict(model.state_dict())
    half.generation_config = model.generation_config
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_folder(
    model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, out: Path
) -> None:
    """Write a normal Hugging Face folder, with the weights in half precision."""
    save_half(model, tokenizer, out)
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
