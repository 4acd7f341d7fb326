"""Folders of Stable Diffusion 3 with random weights, written by diffusers, and its own pipeline."""

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection

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

DYNAMIC = {
    "use_dynamic_shifting": True,
    "base_image_seq_len": 4,
    "max_image_seq_len": 64,
    "max_shift": 0.9,
}


@functools.cache
def build_pipeline(dtype: torch.dtype = torch.float64, *, is_later: bool = False) -> Any:
    """Return diffusers' own pipeline.

    If `is_later`, it has the layers and the shift of version 3.5, and no T5.
    """
    torch.manual_seed(0)
    tokenizers = build_clip_tokenizer(), build_clip_tokenizer(pad_token="!")
    t5_tokenizer = build_t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        # Wider than both networks of CLIP.
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        pos_embed_max_size=12,
        dual_attention_layers=(0,) if is_later else (),
        qk_norm="rms_norm" if is_later else None,
    )
    pipeline = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, **(DYNAMIC if is_later else {})),
        vae=build_vae(1.5, 0.06),
        text_encoder=build_clip(CLIPTextModelWithProjection, tokenizers[0], 16),
        tokenizer=tokenizers[0],
        text_encoder_2=build_clip(CLIPTextModelWithProjection, tokenizers[1], 8),
        tokenizer_2=tokenizers[1],
        text_encoder_3=None if is_later else build_t5(t5_tokenizer, 32),
        tokenizer_3=None if is_later else t5_tokenizer,
        transformer=randomize(transformer),
    ).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write(folder: Path, *, is_later: bool = False) -> None:
    """Write the folder of the pipeline, in float32."""
    build_pipeline(torch.float32, is_later=is_later).save_pretrained(folder)


@torch.no_grad()
def paint_whole(
    prompt: str,
    params: PaintParams,
    number: int = 0,
    dtype: torch.dtype = torch.float64,
    *,
    is_later: bool = False,
) -> Any:
    """Return the pixels from 0 to 1 that the pipeline paints of our noise, [height, width, 3]."""
    width, height = parse_size(params.size)
    assert params.seed is not None
    noise = noise_of(params.seed, number, (4, height // SCALE, width // SCALE))
    images = build_pipeline(dtype, is_later=is_later)(
        prompt=prompt,
        negative_prompt=params.negative_prompt,
        height=height,
        width=width,
        num_inference_steps=params.steps,
        guidance_scale=params.guidance,
        latents=torch.from_numpy(noise)[None].to(dtype),
        output_type="pt",
    ).images
    return images[0].permute(1, 2, 0).numpy()


SPEC = PipelineSpec(
    name="stable_diffusion_3",
    write=write,
    paint_whole=paint_whole,
    sizes=SIZES,
    requests=(
        ("a red circle", PaintParams("48x48", 1, 4, 3.0, "ugly", 1)),
        # CLIP reads only the beginning.
        ("two blue cats on a long table " * 4, PaintParams("48x48", 1, 6, 2.0, "", 2)),
        ("hill", PaintParams("48x48", 1, 3, 1.0, "", 3)),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4)),
        ("tall tree", PaintParams("48x96", 1, 5, 2.5, "a long negative prompt", 5)),
        ("Bäume {0}", PaintParams("48x48", 1, 5, 1.5, "", 2**63 - 1)),
    ),
    settings=(
        ("vae/config.json", "scaling_factor", 1.0),
        ("vae/config.json", "shift_factor", 0.0),
        ("scheduler/scheduler_config.json", "shift", 1.5),
        ("text_encoder/config.json", "num_hidden_layers", 1),
        ("text_encoder_2/config.json", "num_hidden_layers", 1),
        ("text_encoder_3/config.json", "num_layers", 1),
    ),
    max_tokens=256,
    batch_difference=1e-13,
    # The last layer has fewer weights than others.
    # The last layer has no text, so it has other shapes than a second of three.
    layers=("num_layers", "transformer_blocks.1.norm1_context.linear.bias has the shape"),
    bad_sizes=(
        *BAD_SIZES,
        ("16x208", "16x208: 13 patches of one side are over the limit of 12"),
    ),
)
