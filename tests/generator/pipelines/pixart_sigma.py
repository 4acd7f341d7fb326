"""Folders of PixArt-Sigma with random weights, written by diffusers, and its own pipeline."""

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5EncoderModel
from transformers.models.t5.tokenization_t5 import T5Tokenizer

from ops.harness.qwen_images import SCALE, randomize
from shared.protocol.images import PaintParams, parse_size
from tests.generator.pipelines.parts import build_vae
from tests.generator.pipelines.spec import BAD_SIZES, SIZES, PipelineSpec
from workers.generator.core.denoising import noise_of


def _tokenizer() -> Any:
    """Return a tokenizer of characters, and of `a` at the beginning of a word."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁a", -1.0)]
    characters = [(chr(code), -3.0) for code in range(ord("!"), ord("ÿ"))]
    return T5Tokenizer(vocab=special + characters, extra_ids=0, model_max_length=512)


def _text_encoder(num_tokens: int) -> Any:
    config = T5Config(
        vocab_size=num_tokens,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


@functools.cache
def build_pipeline(dtype: torch.dtype = torch.float64) -> Any:
    """Return diffusers' own pipeline, whose transformer also predicts variances."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=12,
        caption_channels=16,
        use_additional_conditions=False,
    )
    pipeline = PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=randomize(_text_encoder(len(tokenizer))),
        vae=build_vae(0.13, None),
        transformer=randomize(transformer),
        scheduler=DPMSolverMultistepScheduler(),
    ).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write(folder: Path) -> None:
    """Write the folder of the pipeline, in float32."""
    build_pipeline(torch.float32).save_pretrained(folder)


@torch.no_grad()
def paint_whole(
    prompt: str, params: PaintParams, number: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """Return the pixels from 0 to 1 that the pipeline paints of our noise, [height, width, 3]."""
    width, height = parse_size(params.size)
    assert params.seed is not None
    noise = noise_of(params.seed, number, (4, height // SCALE, width // SCALE))
    images = build_pipeline(dtype)(
        prompt=prompt,
        negative_prompt=params.negative_prompt,
        height=height,
        width=width,
        num_inference_steps=params.steps,
        guidance_scale=params.guidance,
        latents=torch.from_numpy(noise)[None].to(dtype),
        clean_caption=False,
        use_resolution_binning=False,
        output_type="pt",
    ).images
    return images[0].permute(1, 2, 0).numpy()


SPEC = PipelineSpec(
    name="pixart_sigma",
    write=write,
    paint_whole=paint_whole,
    sizes=SIZES,
    requests=(
        ("a red circle", PaintParams("48x48", 1, 4, 3.0, "ugly", 1)),
        ("two blue cats on a long table", PaintParams("48x48", 1, 6, 2.0, "", 2)),
        ("hill", PaintParams("48x48", 1, 3, 1.0, "", 3)),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4)),
        ("tall tree", PaintParams("48x96", 1, 5, 2.5, "a long negative prompt", 5)),
        # Schedules of 15 steps and more are long ones for the solver.
        (" Bäume {0}", PaintParams("48x48", 1, 16, 1.5, "", 2**63 - 1)),
    ),
    settings=(
        ("vae/config.json", "scaling_factor", 1.0),
        ("scheduler/scheduler_config.json", "beta_end", 0.012),
        ("scheduler/scheduler_config.json", "solver_order", 1),
        ("scheduler/scheduler_config.json", "solver_type", "heun"),
        ("scheduler/scheduler_config.json", "prediction_type", "v_prediction"),
        ("transformer/config.json", "interpolation_scale", 2),
    ),
    max_tokens=300,
    bad_sizes=BAD_SIZES,
    refused=(
        (
            "scheduler/scheduler_config.json",
            "algorithm_type",
            "sde-dpmsolver++",
            "scheduler: algorithm_type 'sde-dpmsolver++' is not supported; supported: 'dpm",
        ),
    ),
    # Four and more times are multiplied by another kernel of the CPU, which adds in another order.
    # The last latents are the prediction, which no scheduler rounds.
    batch_difference=1e-14,
)
