"""Folders of Qwen-Image with random weights, written by diffusers, and its own pipeline."""

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from shared.protocol.images import PaintParams, parse_size
from tests.generator.pipelines.spec import PipelineSpec
from workers.generator.core.denoising import noise_of

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IDS = {token: number for number, token in enumerate(SPECIAL)}
SCALE = 8
"""Factor between the sides of an image and the sides of its latents."""


def _tokenizer() -> Any:
    symbols = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


def _text_encoder(num_tokens: int) -> Any:
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": num_tokens,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [1, 1, 2],
        },
        "max_position_embeddings": 2048,
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|im_end|>"],
    }
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision | {"out_hidden_size": 16},
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


@functools.cache
def build_pipeline(dtype: torch.dtype = torch.float64) -> Any:
    """Return diffusers' own pipeline. Its latents have neither mean 0 nor standard deviation 1."""
    pipeline = QwenImagePipeline(**build_parts()).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build_parts(**transformer_settings: Any) -> dict[str, Any]:
    """Return the parts of a pipeline, with random weights."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
        **transformer_settings,
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.7, 0.3, 0.1, 1.5],
        latents_std=[2.8, 1.4, 0.6, 1.9],
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=4,
        max_image_seq_len=64,
        base_shift=0.5,
        max_shift=0.9,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    for parameter in transformer.parameters():
        parameter.data.normal_(0, 0.2)
    text_encoder = _text_encoder(len(tokenizer))
    for parameter in text_encoder.parameters():
        parameter.data.normal_(0, 0.2)
    return {
        "scheduler": scheduler,
        "vae": vae.eval(),
        "text_encoder": text_encoder.eval(),
        "tokenizer": tokenizer,
        "transformer": transformer.eval(),
    }


def write(folder: Path) -> None:
    """Write the folder of the pipeline, in float32, with several files of the transformer."""
    pipeline = build_pipeline(torch.float32)
    pipeline.save_pretrained(folder)
    for file in (folder / "transformer").glob("*.safetensors"):
        file.unlink()
    pipeline.transformer.save_pretrained(folder / "transformer", max_shard_size="60KB")


@torch.no_grad()
def paint_whole(
    prompt: str, params: PaintParams, number: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """Return the pixels from 0 to 1 that the pipeline paints of our noise, [height, width, 3].

    An omitted negative prompt is a space, as the card of Qwen-Image says.
    """
    pipeline = build_pipeline(dtype)
    width, height = parse_size(params.size)
    assert params.seed is not None
    shape = (4, height // SCALE, width // SCALE)
    noise = torch.from_numpy(noise_of(params.seed, number, shape))[None, :, None]
    packed = pipeline._pack_latents(noise, 1, *shape)
    images = pipeline(
        prompt=prompt,
        negative_prompt=params.negative_prompt or " ",
        height=height,
        width=width,
        num_inference_steps=params.steps,
        true_cfg_scale=params.guidance,
        latents=packed.to(dtype),
        max_sequence_length=1024,
        output_type="pt",
    ).images
    return images[0].permute(1, 2, 0).numpy()


SPEC = PipelineSpec(
    name="qwen_image",
    write=write,
    paint_whole=paint_whole,
    sizes=("48x48", "96x48", "48x96"),
    requests=(
        ("a red circle", PaintParams("48x48", 1, 4, 3.0, "ugly", 1)),
        ("two blue cats on a long table", PaintParams("48x48", 1, 6, 2.0, "", 2)),
        ("hill", PaintParams("48x48", 1, 3, 1.0, "", 3)),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4)),
        # The packed latents have the shape of the ones before, but another grid.
        ("tall tree", PaintParams("48x96", 1, 5, 2.5, "a long negative prompt", 5)),
        ("Bäume {0}", PaintParams("48x48", 1, 5, 1.5, "", 2**63 - 1)),
    ),
    settings=(
        ("vae/config.json", "latents_mean", [0.0, 0.0, 0.0, 0.0]),
        ("vae/config.json", "latents_std", [1.0, 1.0, 1.0, 1.0]),
        ("scheduler/scheduler_config.json", "max_shift", 1.15),
        ("scheduler/scheduler_config.json", "shift_terminal", None),
    ),
    max_tokens=1024,
    bad_sizes=(
        ("56x48", "56x48: width and height must be multiples of 16"),
        ("8192x8192", "8192x8192: 262144 patches are over the limit of 16384"),
    ),
)
