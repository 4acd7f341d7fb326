"""Parts with random weights that several pipelines have."""

import string
from typing import Any

from diffusers import AutoencoderKL
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTokenizer
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5EncoderModel
from transformers.models.t5.tokenization_t5 import T5Tokenizer

from ops.harness.qwen_images import randomize


def build_clip_tokenizer(**options: Any) -> Any:
    """Return a tokenizer of CLIP with a token for each byte, which marks the ends of words."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = ["<|startoftext|>", *symbols, *(f"{symbol}</w>" for symbol in symbols)]
    vocab = {symbol: number for number, symbol in enumerate([*symbols, "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77, **options)


def build_clip(clip_class: Any, tokenizer: Any, width: int = 16) -> Any:
    """Return a text encoder of CLIP with random weights."""
    config = CLIPTextConfig(
        hidden_size=width,
        intermediate_size=16,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return randomize(clip_class(config))


def build_t5_tokenizer() -> Any:
    """Return a tokenizer of T5 with a token for each character, also with the space before it."""
    pieces = [piece for letter in string.printable for piece in (letter, f"▁{letter}")]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    vocab += [(piece, -2.0) for piece in dict.fromkeys(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def build_t5(tokenizer: Any, width: int = 16) -> Any:
    """Return an encoder of T5 with random weights."""
    config = T5Config(
        d_model=width,
        d_ff=16,
        d_kv=8,
        num_layers=2,
        num_heads=2,
        vocab_size=len(tokenizer),
        feed_forward_proj="gated-gelu",
    )
    return randomize(T5EncoderModel(config))


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
