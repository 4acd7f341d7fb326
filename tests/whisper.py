"""Tiny Whisper models with random weights, in folders like those of the checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers

from tests.engine.model.test_parity import widen
from tests.models.test_generic import move_vectors
from tests.sounds import transformers

WINDOW_S = 2
SEED = 13
"""A seed of weights for which the answers vary."""
LANGUAGES = ("en", "de", "fr")
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
]
IDS = {token: 256 + i for i, token in enumerate(SPECIAL)}
VOCAB_SIZE = 256 + len(SPECIAL) + 50 * WINDOW_S
START = IDS["<|startoftranscript|>"]
# A layer of the encoder has other numbers than a layer of the decoder.
SIZES = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 80,
    "max_target_positions": 96,
}
# So many that an answer without this rule is another one.
SUPPRESSED = [*range(0, 256, 4), *(IDS[token] for token in SPECIAL[1:])]
GENERATION = {
    "begin_suppress_tokens": [*range(1, 256, 4), IDS["<|endoftext|>"]],
    "decoder_start_token_id": START,
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|endoftext|>"],
    "pad_token_id": IDS["<|endoftext|>"],
    "is_multilingual": True,
    "lang_to_id": {f"<|{language}|>": IDS[f"<|{language}|>"] for language in LANGUAGES},
    "task_to_id": {task: IDS[f"<|{task}|>"] for task in ("transcribe", "translate")},
    "no_timestamps_token_id": IDS["<|notimestamps|>"],
    "prev_sot_token_id": IDS["<|startofprev|>"],
    "max_length": 64,
    "return_timestamps": False,
    "suppress_tokens": SUPPRESSED,
}


def make_tokenizer() -> Any:
    """Return a tokenizer with a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = transformers.WhisperTokenizer({letter: i for i, letter in enumerate(letters)}, [])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(50 * WINDOW_S)])
    assert tokenizer.convert_tokens_to_ids(SPECIAL) == [*IDS.values()]
    return tokenizer


def write_whisper(
    folder: Path, *, tied: bool = False, sizes: Mapping[str, int] | None = None, **generation: Any
) -> Any:
    """Write a model folder, and return the model; `generation` changes generation_config.json.

    The checkpoints have a `tied` head, with which random weights repeat one token. `sizes` are
    other values of the config.
    """
    make_tokenizer().save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S).save_pretrained(
        folder
    )
    config = transformers.WhisperConfig(
        vocab_size=VOCAB_SIZE,
        num_mel_bins=16,
        max_source_positions=50 * WINDOW_S,
        **(SIZES | dict(sizes or {})),
        decoder_start_token_id=START,
        bos_token_id=IDS["<|endoftext|>"],
        eos_token_id=IDS["<|endoftext|>"],
        pad_token_id=IDS["<|endoftext|>"],
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).double()
    model.eval().requires_grad_(False)
    widen(model, SEED)
    move_vectors(model)
    model.save_pretrained(folder)
    settings = {name: v for name, v in (GENERATION | generation).items() if v is not None}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model
