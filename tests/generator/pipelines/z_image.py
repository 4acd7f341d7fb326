"""Folders of Z-Image with random weights, written by diffusers, and its own pipeline."""

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from ops.harness.qwen_images import IDS, SCALE, build_tokenizer, randomize
from shared.protocol.images import PaintParams, parse_size
from tests.generator.pipelines.parts import build_vae
from tests.generator.pipelines.spec import BAD_SIZES, SIZES, PipelineSpec
from workers.generator.core.denoising import noise_of

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _text_encoder(num_tokens: int) -> Any:
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=num_tokens,
        max_position_embeddings=2048,
        bos_token_id=IDS["<|endoftext|>"],
        eos_token_id=IDS["<|im_end|>"],
    )
    return Qwen3Model(config)


@functools.cache
def build_pipeline(dtype: torch.dtype = torch.float64) -> Any:
    """Return diffusers' own pipeline, which shifts latents and times."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(chat_template=TEMPLATE, pad_token="<|endoftext|>")
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 64, 64],
    )
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=build_vae(0.36, 0.12),
        text_encoder=randomize(_text_encoder(len(tokenizer))),
        tokenizer=tokenizer,
        transformer=randomize(transformer),
    ).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write(folder: Path) -> None:
    """Write the folder of the pipeline, in float32, with the text encoder's published class."""
    pipeline = build_pipeline(torch.float32)
    pipeline.save_pretrained(folder)


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
        latents=torch.from_numpy(noise)[None].float(),
        output_type="pt",
    ).images
    return images[0].permute(1, 2, 0).numpy()


SPEC = PipelineSpec(
    name="z_image",
    write=write,
    paint_whole=paint_whole,
    sizes=SIZES,
    requests=(
        ("a red circle", PaintParams("48x48", 1, 4, 3.0, "ugly", 1)),
        ("two blue cats on a long table", PaintParams("48x48", 1, 6, 2.0, "", 2)),
        ("hill", PaintParams("48x48", 1, 3, 0.0, "", 3)),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4)),
        # Its tokens are more than 32, which is what the transformer fills texts up to.
        ("tall tree", PaintParams("48x96", 1, 5, 2.5, "a long negative prompt of many words", 5)),
        ("Bäume {0}", PaintParams("48x48", 1, 5, 0.5, "", 2**63 - 1)),
    ),
    settings=(
        ("vae/config.json", "scaling_factor", 1.0),
        ("vae/config.json", "shift_factor", 0.0),
        ("scheduler/scheduler_config.json", "shift", 6.0),
    ),
    max_tokens=512,
    bad_sizes=(
        *BAD_SIZES,
        ("16x8208", "16x8208: 513 patches of one side are over the limit of 512"),
    ),
    refused=(
        ("model_index.json", "siglip", ["transformers", "Siglip2VisionModel"], "a part 'siglip'"),
        ("text_encoder/config.json", "architectures", ["Qwen3_5Model"], "'Qwen3_5Model'"),
    ),
    latents_dtype="float32",
    layers=("n_layers", "lacks weights: layers.2."),
)
