"""Folders of Qwen-Image with random weights, written by diffusers."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.utils import logging
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

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


class Width(NamedTuple):
    """Sizes of the transformer; those of the other networks are fixed."""

    num_heads: int = 3
    head: int = 16
    """Width of a head, a multiple of 8."""
    num_layers: int = 2


SMALL = Width()


def build_tokenizer(**options: Any) -> Any:
    """Return a tokenizer of bytes with the special tokens of Qwen."""
    symbols = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=4096, **options)
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
def build_pipeline(dtype: torch.dtype = torch.float64, width: Width = SMALL) -> Any:
    """Return diffusers' own pipeline. Its latents have neither mean 0 nor standard deviation 1."""
    pipeline = QwenImagePipeline(**build_parts(width)).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build_parts(width: Width = SMALL, **transformer_settings: Any) -> dict[str, Any]:
    """Return the parts of a pipeline with random weights, in float32."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=width.num_layers,
        attention_head_dim=width.head,
        num_attention_heads=width.num_heads,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(width.head // 2, width.head // 4, width.head // 4),
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
    randomize(transformer)
    return {
        "scheduler": scheduler,
        "vae": vae.eval(),
        "text_encoder": randomize(_text_encoder(len(tokenizer))),
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def randomize(network: Any, deviation: float = 0.2) -> Any:
    """Fill a network with random weights, and return it for inference."""
    for parameter in network.parameters():
        parameter.data.normal_(0, deviation)
    return network.eval()


def write(folder: Path, width: Width = SMALL) -> None:
    """Write the folder of the pipeline, in float32, with several files of the transformer."""
    pipeline = build_pipeline(torch.float32, width)
    pipeline.save_pretrained(folder)
    for file in (folder / "transformer").glob("*.safetensors"):
        file.unlink()
    pipeline.transformer.save_pretrained(folder / "transformer", max_shard_size="60KB")
