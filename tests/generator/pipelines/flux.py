"""Folders of FLUX.1 with random weights, written by diffusers, and its own pipeline."""

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from ops.harness.qwen_images import SCALE, randomize
from shared.protocol.images import PaintParams, parse_size
from tests.generator.pipelines.parts import (
    build_clip,
    build_clip_tokenizer,
    build_t5,
    build_t5_tokenizer,
    build_vae,
)
from tests.generator.pipelines.spec import BAD_SIZES, SIZES, PipelineSpec
from workers.generator.core.denoising import noise_of


@functools.cache
def build_pipeline(dtype: torch.dtype = torch.float64, *, is_guided: bool = True) -> Any:
    """Return diffusers' own pipeline, of [dev] if `is_guided`, and of [schnell] otherwise."""
    torch.manual_seed(0)
    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=is_guided,
        axes_dims_rope=(8, 4, 4),
    )
    dynamic = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=4,
        max_image_seq_len=64,
        base_shift=0.5,
        max_shift=0.9,
    )
    pipeline = FluxPipeline(
        scheduler=dynamic if is_guided else FlowMatchEulerDiscreteScheduler(),
        vae=build_vae(0.36, 0.12),
        text_encoder=build_clip(CLIPTextModel, clip_tokenizer),
        tokenizer=clip_tokenizer,
        text_encoder_2=build_t5(t5_tokenizer),
        tokenizer_2=t5_tokenizer,
        transformer=randomize(transformer),
    ).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write(folder: Path, *, is_guided: bool = True) -> None:
    """Write the folder of the pipeline, in float32."""
    build_pipeline(torch.float32, is_guided=is_guided).save_pretrained(folder)


@torch.no_grad()
def paint_whole(
    prompt: str,
    params: PaintParams,
    number: int = 0,
    dtype: torch.dtype = torch.float64,
    *,
    is_guided: bool = True,
) -> Any:
    """Return the pixels from 0 to 1 that the pipeline paints of our noise, [height, width, 3]."""
    pipeline = build_pipeline(dtype, is_guided=is_guided)
    width, height = parse_size(params.size)
    assert params.seed is not None
    shape = (4, height // SCALE, width // SCALE)
    noise = torch.from_numpy(noise_of(params.seed, number, shape))[None]
    images = pipeline(
        prompt=prompt,
        height=height,
        width=width,
        num_inference_steps=params.steps,
        guidance_scale=params.guidance,
        latents=pipeline._pack_latents(noise, 1, *shape).to(dtype),
        max_sequence_length=512 if is_guided else 256,
        output_type="pt",
    ).images
    return images[0].permute(1, 2, 0).numpy()


SPEC = PipelineSpec(
    name="flux",
    write=write,
    paint_whole=paint_whole,
    sizes=SIZES,
    requests=(
        ("a red circle", PaintParams("48x48", 1, 4, 3.0, "", 1)),
        # CLIP reads only the beginning.
        ("two blue cats on a long table " * 4, PaintParams("48x48", 1, 6, 2.0, "", 2)),
        ("hill", PaintParams("48x48", 1, 3, 1.0, "", 3)),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "", 4)),
        # The packed latents have the shape of the ones before, but another grid.
        ("tall tree", PaintParams("48x96", 1, 5, 2.5, "", 5)),
        ("Bäume {0}", PaintParams("48x48", 1, 5, 0.0, "", 2**63 - 1)),
    ),
    settings=(
        ("vae/config.json", "scaling_factor", 1.0),
        ("vae/config.json", "shift_factor", 0.0),
        ("scheduler/scheduler_config.json", "max_shift", 1.15),
        ("text_encoder/config.json", "num_hidden_layers", 1),
        ("text_encoder_2/config.json", "num_layers", 1),
    ),
    max_tokens=512,
    batch_difference=1e-13,
    bad_sizes=BAD_SIZES,
)
