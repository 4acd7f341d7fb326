"""Writes small random models that see videos or hear sounds, in folders that both servers read."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from ops.bench.models import IMAGES, MID_ROPE, TINY_TEXT, TINY_VISION, randomize
from workers.settings import DEMO_MODEL

# mypy knows no omni classes in transformers.
transformers: Any = importlib.import_module("transformers")

AUDIO_MARKS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type in ('video', 'video_url') -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part.type in ('audio', 'audio_url', 'input_audio') -%}
{{ '<|audio_bos|><|AUDIO|><|audio_eos|>' }}
{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

WIDTH = TINY_TEXT["hidden_size"]
TEXT = TINY_TEXT | {"num_key_value_heads": 2, "head_dim": 64, "rope_parameters": MID_ROPE}
# As the checkpoints that hear are. vLLM ties by the config of the text, transformers by the whole.
UNTIED = TEXT | {"tie_word_embeddings": False}
WINDOWED_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "num_heads": 4,
    "intermediate_size": 256,
    "out_hidden_size": WIDTH,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
}
DEEP_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "num_heads": 4,
    "intermediate_size": 256,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": 48 * 48,
    "deepstack_visual_indexes": [1, 2],
}
HEARING = {
    "num_mel_bins": 128,
    "d_model": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "max_source_positions": 1500,
}
EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16_000,
    "padding_value": 0.0,
    "padding_side": "right",
    "return_attention_mask": True,
    "n_fft": 400,
    "hop_length": 160,
    "chunk_length": 30,
    "dither": 0.0,
}
DEEP_IMAGES = IMAGES | {
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 4096},
}
# The names of the bounds of older folders would be read instead of `size`.
del DEEP_IMAGES["min_pixels"], DEEP_IMAGES["max_pixels"]


def write_qwen2vl(folder: Path) -> None:
    config = transformers.Qwen2VLConfig(**_seeing(_write_tokenizer(folder), TINY_VISION))
    _write(folder, transformers.Qwen2VLForConditionalGeneration(config))
    _write_eyes(folder, "Qwen2VL", "Qwen2VL", IMAGES)


def write_qwen25vl(folder: Path) -> None:
    config = transformers.Qwen2_5_VLConfig(**_seeing(_write_tokenizer(folder), WINDOWED_VISION))
    _write(folder, transformers.Qwen2_5_VLForConditionalGeneration(config))
    _write_eyes(folder, "Qwen2_5_VL", "Qwen2VL", IMAGES)


def write_qwen3vl(folder: Path) -> None:
    rope = MID_ROPE | {"mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        **_seeing(_write_tokenizer(folder), DEEP_VISION, rope_parameters=rope)
    )
    _write(folder, transformers.Qwen3VLForConditionalGeneration(config))
    _write_eyes(folder, "Qwen3VL", "Qwen3VL", DEEP_IMAGES)


def write_qwen2audio(folder: Path) -> None:
    ids = _write_tokenizer(folder)
    rope = {"rope_type": "default", "rope_theta": MID_ROPE["rope_theta"]}
    config = transformers.Qwen2AudioConfig(
        audio_config=HEARING,
        text_config=UNTIED | _sizes(ids) | {"model_type": "qwen2", "rope_parameters": rope},
        audio_token_index=ids["<|AUDIO|>"],
        tie_word_embeddings=False,
    )
    _write(folder, transformers.Qwen2AudioForConditionalGeneration(config))
    _write_json(folder / "preprocessor_config.json", EXTRACTOR)
    _name_processor(folder, "Qwen2AudioProcessor")


def write_omni(folder: Path) -> None:
    """Write the thinker of a Qwen2.5-Omni, with the config of the whole model."""
    ids = _write_tokenizer(folder)
    thinker = {
        "audio_config": HEARING | {"output_dim": WIDTH, "n_window": 100},
        "vision_config": WINDOWED_VISION,
        "text_config": UNTIED | _sizes(ids),
        "audio_token_index": ids["<|AUDIO|>"],
        "image_token_index": ids["<|image_pad|>"],
        "video_token_index": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    config = transformers.Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
    config.architectures = ["Qwen2_5OmniForConditionalGeneration"]
    _write(folder, transformers.Qwen2_5OmniForConditionalGeneration(config))
    _write_eyes(folder, "Qwen2_5Omni", "Qwen2VL", IMAGES | EXTRACTOR)


def _seeing(ids: dict[str, int], vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    """Return the arguments of the config of a model that sees."""
    return {
        "text_config": TEXT | _sizes(ids) | text,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
    }


def _sizes(ids: dict[str, int]) -> dict[str, int]:
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    return ends | {"vocab_size": len(ids), "bos_token_id": ids["<|endoftext|>"]}


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Write the demo model's tokenizer with the marks of sounds; return the ids of all tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(AUDIO_MARKS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    ids: dict[str, int] = tokenizer.get_vocab()
    return ids


def _write(folder: Path, model: Any) -> None:
    randomize(model)
    model.to(torch.bfloat16).save_pretrained(folder)


def _write_eyes(folder: Path, model: str, processors: str, images: dict[str, Any]) -> None:
    """Write the settings of the processors of images and videos."""
    image = images | {"image_processor_type": "Qwen2VLImageProcessor"}
    _write_json(folder / "preprocessor_config.json", image)
    video = images | {"video_processor_type": f"{processors}VideoProcessor"}
    _write_json(folder / "video_preprocessor_config.json", video)
    _name_processor(folder, f"{model}Processor")


def _name_processor(folder: Path, name: str) -> None:
    file = folder / "tokenizer_config.json"
    marks = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    marks |= {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>"}
    marks |= {"audio_eos_token": "<|audio_eos|>", "vision_bos_token": "<|vision_start|>"}
    marks |= {"vision_eos_token": "<|vision_end|>"}
    settings = json.loads(file.read_text()) | marks | {"processor_class": name}
    _write_json(file, settings)


def _write_json(file: Path, tree: Any) -> None:
    file.write_text(json.dumps(tree, indent=2, ensure_ascii=False))
