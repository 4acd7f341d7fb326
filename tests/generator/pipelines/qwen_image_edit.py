"""Folders of Qwen-Image-Edit with random weights, written by diffusers, and its own pipeline.

In the whole process, images are read with a small share of the usual number of pixels, in the
pipelines of diffusers as well.
"""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

from ops.harness.qwen_images import SCALE, build_parts
from shared.protocol.images import AUTO, PaintParams, parse_size
from tests.generator.pipelines import qwen_image
from tests.generator.pipelines.input_images import SQUARE, TALL, WIDE, image_of
from tests.generator.pipelines.spec import PipelineSpec
from workers.generator.core.denoising import noise_of
from workers.generator.diffusion.qwen_image_edit import AREA, QwenImageEdit
from workers.generator.diffusion.qwen_image_edit_plus import QwenImageEditPlus

AREAS = {AREA: 64 * 64, 384 * 384: 48 * 48}
"""Numbers of pixels of images in these tests, by the usual ones."""
PROCESSOR = "processor"
CALCULATE = pipeline_qwenimage_edit.calculate_dimensions


def read_small_images() -> None:
    QwenImageEdit.area = QwenImageEdit.text_area = AREAS[AREA]
    QwenImageEditPlus.text_area = AREAS[384 * 384]
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        calculate: Any = module.calculate_dimensions

        def smaller(area: int, ratio: float, calculate: Any = calculate) -> Any:
            return calculate(AREAS[area], ratio)

        module.calculate_dimensions = smaller


read_small_images()


def build(pipeline_class: Any, dtype: torch.dtype, **transformer_settings: Any) -> Any:
    """Return a pipeline of diffusers that edits images."""
    parts = build_parts(**transformer_settings)
    # The class of the missing video processor needs torchvision.
    with mock.patch.object(Qwen2VLProcessor, "check_argument_for_proper_class"):
        processor = Qwen2VLProcessor(Qwen2VLImageProcessorPil(), parts["tokenizer"])
    pipeline = pipeline_class(**parts, processor=processor).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write_folder(pipeline: Any, folder: Path) -> None:
    """Write the folder of a pipeline in float32, with the files of published processors."""
    with mock.patch.object(Qwen2VLProcessor, "save_pretrained"):
        pipeline.save_pretrained(folder)
    pipeline.processor.image_processor.save_pretrained(folder / PROCESSOR)
    pipeline.processor.tokenizer.save_pretrained(folder / PROCESSOR)


@torch.no_grad()
def paint_by(
    pipeline: Any, images: Any, prompt: str, params: PaintParams, number: int, dtype: torch.dtype
) -> Any:
    """Return the pixels from 0 to 1 that a pipeline paints of our noise, [height, width, 3]."""
    if params.size == AUTO:
        last = images[-1] if isinstance(images, list) else images
        calculate: Any = pipeline_qwenimage_edit.calculate_dimensions
        width, height, _ = calculate(AREA, last.width / last.height)
    else:
        width, height = parse_size(params.size)
    assert params.seed is not None
    shape = (4, height // SCALE, width // SCALE)
    noise = torch.from_numpy(noise_of(params.seed, number, shape))[None, :, None]
    edited = pipeline(
        image=images,
        prompt=prompt,
        negative_prompt=params.negative_prompt or " ",
        height=None if params.size == AUTO else height,
        width=None if params.size == AUTO else width,
        num_inference_steps=params.steps,
        true_cfg_scale=params.guidance,
        latents=pipeline._pack_latents(noise, 1, *shape).to(dtype),
        output_type="pt",
    ).images
    return edited[0].permute(1, 2, 0).numpy()


@functools.cache
def build_pipeline(dtype: torch.dtype = torch.float64) -> Any:
    return build(QwenImageEditPipeline, dtype)


def write(folder: Path) -> None:
    write_folder(build_pipeline(torch.float32), folder)


def paint_whole(
    prompt: str, params: PaintParams, number: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    (url,) = params.input_images
    return paint_by(build_pipeline(dtype), image_of(url), prompt, params, number, dtype)


SPEC = PipelineSpec(
    name="qwen_image_edit",
    write=write,
    paint_whole=paint_whole,
    sizes=("48x48", "96x48"),
    requests=(
        ("a red circle", PaintParams(AUTO, 1, 4, 3.0, "ugly", 1, 0, (SQUARE,))),
        ("two blue cats on a long table", PaintParams(AUTO, 1, 6, 2.0, "", 2, 0, (SQUARE,))),
        ("hill", PaintParams(AUTO, 1, 3, 1.0, "", 3, 0, (SQUARE,))),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4, 0, (WIDE,))),
        # The latents of the image to edit have the shape of the ones before, but another grid.
        ("wide tree", PaintParams("96x48", 1, 5, 2.5, "a long negative", 5, 0, (TALL,))),
        ("Bäume {0}", PaintParams(AUTO, 1, 5, 1.5, "", 2**63 - 1, 0, (SQUARE,))),
    ),
    settings=(
        *qwen_image.SPEC.settings,
        ("processor/preprocessor_config.json", "image_mean", [0.1, 0.5, 0.9]),
    ),
    max_tokens=1024,
    bad_sizes=qwen_image.SPEC.bad_sizes,
    cuts_texts=False,
)
