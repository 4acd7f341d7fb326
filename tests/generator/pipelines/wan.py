"""Folders of Wan with random weights, written by diffusers, and its own pipeline."""

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers.models.t5.tokenization_t5 import T5Tokenizer
from transformers.models.umt5 import UMT5Config, UMT5EncoderModel

from shared.protocol.images import PaintParams, parse_size
from tests.generator.pipelines.spec import PipelineSpec
from workers.generator.core.denoising import noise_of

SIDE, LENGTH = 8, 4
"""Factors between the sides and the length of a video and of its latents."""


def _tokenizer() -> Any:
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁a", *letters]
    return T5Tokenizer(vocab=[(piece, -float(n)) for n, piece in enumerate(pieces)], extra_ids=0)


def _transformer() -> Any:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )


@functools.cache
def build_pipeline(
    dtype: torch.dtype = torch.float64, boundary: float | None = None, expands: bool = False
) -> Any:
    """Return diffusers' own pipeline. Its latents have neither mean 0 nor standard deviation 1.

    With a boundary it has two transformers, as some models of Wan 2.2. If it `expands` times, each
    patch has a time, as in others.
    """
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    text_encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2
        )
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.7, 0.3, 0.1, 1.5],
        latents_std=[2.8, 1.4, 0.6, 1.9],
    )
    networks = [_transformer() for _ in range(1 if boundary is None else 2)]
    for network in (*networks, text_encoder):
        for parameter in network.parameters():
            parameter.data.normal_(0, 0.2)
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=vae.eval(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=networks[0].eval(),
        transformer_2=networks[1].eval() if boundary else None,
        boundary_ratio=boundary,
        expand_timesteps=expands,
    ).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write(folder: Path, **variant: Any) -> None:
    """Write the folder of the pipeline, in float32."""
    build_pipeline(torch.float32, **variant).save_pretrained(folder)


@functools.cache
@torch.no_grad()
def paint_whole(
    prompt: str,
    params: PaintParams,
    number: int = 0,
    dtype: torch.dtype = torch.float64,
    **variant: Any,
) -> Any:
    """Return the pixels from 0 to 1 that the pipeline makes of our noise, [frames, h, w, 3]."""
    width, height = parse_size(params.size)
    assert params.seed is not None
    assert params.frames is not None
    shape = (4, (params.frames - 1) // LENGTH + 1, height // SIDE, width // SIDE)
    frames = build_pipeline(dtype, **variant)(
        prompt=prompt,
        negative_prompt=params.negative_prompt,
        height=height,
        width=width,
        num_frames=params.frames,
        num_inference_steps=params.steps,
        guidance_scale=params.guidance,
        latents=torch.from_numpy(noise_of(params.seed, number, shape))[None],
        output_type="pt",
    ).frames
    return frames[0].permute(0, 2, 3, 1).numpy()


def params_of(size: str, steps: int, guidance: float, negative: str, seed: int, frames: int) -> Any:
    return PaintParams(size, 1, steps, guidance, negative, seed, frames=frames, fps=16)


SPEC = PipelineSpec(
    name="wan",
    write=write,
    paint_whole=paint_whole,
    sizes=("32x16", "32x32", "16x32"),
    requests=(
        ("a red circle", params_of("32x16", 4, 3.0, "ugly", 1, 5)),
        ("two  blue cats &amp; dogs\n", params_of("32x16", 6, 2.0, "", 2, 5)),
        ("hill", params_of("32x16", 3, 1.0, "", 3, 5)),
        ("wide sea", params_of("32x32", 4, 4.0, "x", 4, 9)),
        ("tall tree", params_of("16x32", 5, 2.5, "a long negative prompt", 5, 1)),
        ("one {0}", params_of("32x16", 5, 1.5, "", 2**63 - 1, 5)),
    ),
    settings=(
        ("vae/config.json", "latents_mean", [0.0, 0.0, 0.0, 0.0]),
        ("vae/config.json", "latents_std", [1.0, 1.0, 1.0, 1.0]),
        ("scheduler/scheduler_config.json", "flow_shift", 5.0),
    ),
    max_tokens=512,
    bad_sizes=(
        ("40x32", "40x32: width and height must be multiples of 16"),
        ("4096x4096", "4096x4096: 65536 patches are over the limit of 8160"),
    ),
    latents_dtype="float32",
    layers=("num_layers", "lacks weights: blocks.2."),
)
