"""Parts with random weights that several pipelines have."""

from typing import Any

from diffusers import AutoencoderKL
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

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


def build_tokenizer(**options: Any) -> Any:
    """Return a tokenizer of bytes with the special tokens of Qwen."""
    symbols = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=4096, **options)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


def build_vae(scaling_factor: float, shift_factor: float | None) -> Any:
    """Return a VAE with four channels of latents."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
    ).eval()


def randomize(network: Any, deviation: float = 0.2) -> Any:
    """Fill a network with random weights, and return it for inference."""
    for parameter in network.parameters():
        parameter.data.normal_(0, deviation)
    return network.eval()
