"""Tiny models of generic families with sounds, each from one entry of SPECS."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared.models.registry import find_model_class
from tests.engine.model.test_parity import widen
from tests.models.test_generic import move_vectors
from tests.models.vision_specs import TEMPLATE, make_config
from tests.sounds import transformers

WINDOW_S = 2
NUM_BINS = 16
TOKENS = [
    *("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<sound>"),
    *("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
]
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}
SIZES = {
    "num_mel_bins": NUM_BINS,
    "max_source_positions": 50 * WINDOW_S,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}


@dataclass(frozen=True)
class Spec:
    marker: str = "<sound>"
    """Text that the chat template writes for a sound."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values of the config by dotted keys."""
    processor: dict[str, Any] = field(default_factory=dict)
    """Settings of processor_config.json."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens that the processor reads from its tokenizer."""
    extractor: str = "WhisperFeatureExtractor"
    seed: int = 8
    """A seed of weights for which the answers vary."""


MARKED = "<|audio_start|><|audio_pad|><|audio_end|>"
NAMES = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
BOUNDS = {
    "audio_bos_token_id": IDS["<|audio_start|>"],
    "audio_eos_token_id": IDS["<|audio_end|>"],
}

SPECS = {
    "audioflamingo3": Spec(),
    "glmasr": Spec(
        processor={"audio_token": "<sound>"},
        # The projector joins four embeddings.
        config={"audio_config.intermediate_size": 256, "audio_config.num_key_value_heads": 4},
    ),
    "moss_transcribe_diarize": Spec(
        MARKED,
        {"audio_token_id": IDS["<|audio_pad|>"], "audio_chunk_size": 16_000 * WINDOW_S},
        processor=NAMES,
        extractor="MossTranscribeDiarizeFeatureExtractor",
    ),
    "musicflamingo": Spec(config=BOUNDS, processor=NAMES | {"audio_token": "<sound>"}),
    "qwen3_asr": Spec(
        MARKED,
        {"audio_token_id": IDS["<|audio_pad|>"], "eos_token_id": IDS["</s>"]},
        tokens=NAMES,
        extractor="Qwen3ASRFeatureExtractor",
    ),
}


def make_tokenizer(spec: Spec) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte."""
    symbols = TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", **special, extra_special_tokens=spec.tokens
    )
    wrapped.chat_template = TEMPLATE.replace("'image'", "'audio'").replace("IMAGE", spec.marker)
    return wrapped


def write_files(folder: Path, model_type: str) -> Any:
    """Write a folder without weights, and return its config."""
    spec = SPECS[model_type]
    make_tokenizer(spec).save_pretrained(folder)
    extractor = getattr(transformers, spec.extractor)
    extractor(feature_size=NUM_BINS, chunk_length=WINDOW_S).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(spec.processor))
    config = make_config(model_type, SIZES, **{"audio_token_id": IDS["<sound>"]} | spec.config)
    config.save_pretrained(folder)
    return config


def write_folder(folder: Path, model_type: str) -> PreTrainedModel:
    """Write a folder with weights in float64, and return the model."""
    model = draw_model(write_files(folder, model_type), SPECS[model_type].seed)
    model.save_pretrained(folder)
    return model


def draw_model(config: Any, seed: int) -> PreTrainedModel:
    """Return a model in float64, with all parameters drawn."""
    torch.manual_seed(0)
    model: PreTrainedModel = find_model_class(config)._from_config(config, dtype=torch.float64)
    model.eval().requires_grad_(False)
    widen(model, seed)
    move_vectors(model)
    return model
