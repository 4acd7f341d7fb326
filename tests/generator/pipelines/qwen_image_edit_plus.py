"""Folders of Qwen-Image-Edit-Plus with random weights, and diffusers' own pipeline."""

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageEditPlusPipeline

from shared.protocol.images import AUTO, PaintParams
from tests.generator.pipelines import qwen_image_edit
from tests.generator.pipelines.input_images import SQUARE, TALL, WIDE, image_of


@functools.cache
def build_pipeline(dtype: torch.dtype = torch.float64) -> Any:
    # As in the published version 2511. Version 2509 has false.
    return qwen_image_edit.build(QwenImageEditPlusPipeline, dtype, zero_cond_t=True)


def write(folder: Path) -> None:
    qwen_image_edit.write_folder(build_pipeline(torch.float32), folder)


def paint_whole(
    prompt: str, params: PaintParams, number: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    images = [image_of(url) for url in params.input_images]
    pipeline = build_pipeline(dtype)
    return qwen_image_edit.paint_by(pipeline, images, prompt, params, number, dtype)


SPEC = qwen_image_edit.SPEC._replace(
    name="qwen_image_edit_plus",
    write=write,
    paint_whole=paint_whole,
    requests=(
        ("a red circle", PaintParams(AUTO, 1, 4, 3.0, "ugly", 1, 0, (WIDE, SQUARE))),
        ("two blue cats on a table", PaintParams(AUTO, 1, 6, 2.0, "", 2, 0, (WIDE, SQUARE))),
        ("hill", PaintParams(AUTO, 1, 3, 1.0, "", 3, 0, (WIDE, SQUARE))),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4, 0, (SQUARE, WIDE, TALL))),
        ("wide tree", PaintParams("96x48", 1, 5, 2.5, "a long negative", 5, 0, (TALL,))),
        ("Bäume {0}", PaintParams(AUTO, 1, 5, 1.5, "", 2**63 - 1, 0, (WIDE, SQUARE))),
    ),
)
