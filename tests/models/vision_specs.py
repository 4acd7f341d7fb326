"""Tiny models of generic families with images, each from one entry of SPECS.

A folder has random weights in float64, a tokenizer with a token for each byte, and the settings of
the type's image processor and processor.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.engine.model.test_parity import widen
from tests.models.test_generic import move_vectors

SIDE, PATCH = 56, 14
SQUARE = {"height": SIDE, "width": SIDE}
PINPOINTS = [[56, 112], [112, 56], [112, 112]]
GRID_SIZE = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 40}
TILES = {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
EDGES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": SIDE}}
TOKENS = [
    *("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    *("<|image|>", "<|video|>", "<img>", "</img>", "<IMG_CONTEXT>", "<|patch|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<imgpad>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Each value is set where a config has the key, at any depth.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "depth": 2,
    "num_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    # Smaller than an image.
    "sliding_window": 7,
    "image_size": SIDE,
    "patch_size": PATCH,
    "out_hidden_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": IDS["<pad>"],
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Spec:
    image_processor: tuple[str, str, dict[str, Any]]
    """Module, class without its suffix, and settings."""
    processor: dict[str, Any]
    """Settings of processor_config.json."""
    config: dict[str, Any]
    """Values of the config by dotted keys."""
    marker: str = "<image>"
    """Text that the chat template writes for an image."""
    sizes: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens that the processor reads from its tokenizer."""
    merged: str = ""
    """A letter of which the tokenizer merges two."""
    seed: int = 8
    """A seed of weights for which the answers vary."""


def ids(**tokens: str) -> dict[str, int]:
    return {key: IDS[token] for key, token in tokens.items()}


MARKED = "<|begin_of_image|><|image|><|end_of_image|>"
PLAIN = {"image_token": "<|image|>", "video_token": "<|video|>"}
PLAIN_IDS = ids(image_token_id="<|image|>", video_token_id="<|video|>")
WINDOWS = {"vision_config.fullatt_block_indexes": [1], "vision_config.window_size": 56}
LLAVA_IDS = ids(image_token_id="<image>", image_token_index="<image>")
PIXTRAL = {"size": {"longest_edge": 112}, "patch_size": PATCH}
INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
HYBRID_SIZES = {
    "in_channels": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "shared_expert_intermediate_size": 48,
}
SIDES = {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}


def rotary(*sections: int, **settings: Any) -> dict[str, Any]:
    """Return rotary positions for the time, the rows and the columns of images."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"text_config.rope_parameters": parameters | settings}


def glm(module: str, name: str, **settings: Any) -> Spec:
    marks = {
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    return Spec(
        (module, name, {"size": GRID_SIZE, "patch_size": PATCH}),
        {},
        PLAIN_IDS | ids(**marks) | settings,
        marker=MARKED,
        sizes={"in_channels": 3},
        tokens=PLAIN,
    )


def qwen3_5() -> Spec:
    marks = {
        "vision_start_token_id": "<|begin_of_image|>",
        "vision_end_token_id": "<|end_of_image|>",
    }
    positions = rotary(2, 1, 1, partial_rotary_factor=0.5, mrope_interleaved=True)
    return Spec(
        ("qwen2_vl", "Qwen2VL", {"size": GRID_SIZE, "patch_size": PATCH}),
        {},
        PLAIN_IDS | ids(**marks) | positions,
        marker=MARKED,
        sizes=HYBRID_SIZES,
        tokens=PLAIN,
    )


SPECS = {
    "aria": Spec(
        ("aria", "Aria", {"max_image_size": 490, "min_image_size": 336}),
        {"size_conversion": {"490": 16, "980": 32}},
        {
            **ids(image_token_index="<image>"),
            # An image of 490 pixels has 5 x 5 patches, and 16 embeddings.
            "projector_patch_to_query_dict": {"25": 16, "100": 32},
            "vision_config.image_size": 490,
        },
        sizes={"patch_size": 98},
        tokens={"image_token": "<image>"},
    ),
    "aya_vision": Spec(
        ("got_ocr2", "GotOcr2", TILES),
        {
            "patch_size": PATCH,
            "img_size": SIDE,
            "image_token": "<image>",
            "downsample_factor": 2,
            "start_of_img_token": "<img>",
            "end_of_img_token": "</img>",
            "img_patch_token": "<|patch|>",
            "img_line_break_token": "[IMG_BREAK]",
            "tile_token": "<|tile_x_separator|>",
            "tile_global_token": "<|tile_y_separator|>",
        },
        {
            **ids(image_token_id="<|patch|>", image_token_index="<|patch|>"),
            "downsample_factor": 2,
            "vision_feature_layer": -1,
            "alignment_intermediate_size": 64,
        },
    ),
    "exaone4_5": Spec(
        ("qwen2_vl", "Qwen2VL", {"size": GRID_SIZE, "patch_size": PATCH}),
        {},
        PLAIN_IDS | WINDOWS,
        marker=MARKED,
        tokens=PLAIN,
    ),
    "gemma3": Spec(
        ("gemma3", "Gemma3", {"size": SQUARE}),
        {"image_seq_length": 16},
        {
            **ids(image_token_index="<|image|>"),
            **ids(boi_token_index="<|begin_of_image|>", eoi_token_index="<|end_of_image|>"),
            "mm_tokens_per_image": 16,
            "text_config.layer_types": ["sliding_attention", "full_attention"] * 2,
            "text_config.query_pre_attn_scalar": 16,
        },
        marker="<|begin_of_image|>",
        tokens={
            "boi_token": "<|begin_of_image|>",
            "image_token": "<|image|>",
            "eoi_token": "<|end_of_image|>",
        },
        # The text of an image begins and ends with two line breaks.
        merged="Ċ",
    ),
    "gemma4": Spec(
        (
            "gemma4",
            "Gemma4",
            {"patch_size": PATCH, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        ),
        {},
        {
            **ids(
                image_token_id="<|image|>",
                video_token_id="<|video|>",
                audio_token_id="<imgpad>",
                boi_token_id="<|begin_of_image|>",
                eoi_token_id="<|end_of_image|>",
            ),
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 16,
                "patch_size": PATCH,
                "pooling_kernel_size": 2,
                "position_embedding_size": 128,
            },
            "text_config.layer_types": ["sliding_attention", "full_attention"] * 2,
            "text_config.use_bidirectional_attention": "vision",
            # The layers without a window have one wide KV head, whose keys are also the values.
            "text_config.attention_k_eq_v": True,
            "text_config.per_layer_config": {
                layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in ("1", "3")
            },
            "text_config.hidden_size_per_layer_input": 16,
            "text_config.vocab_size_per_layer_input": 512,
            "text_config.enable_moe_block": True,
            "text_config.num_experts": 4,
            "text_config.top_k_experts": 2,
            "text_config.moe_intermediate_size": 48,
        },
        marker="<|image|>",
        tokens={
            "image_token": "<|image|>",
            "boi_token": "<|begin_of_image|>",
            "eoi_token": "<|end_of_image|>",
            "audio_token": "<imgpad>",
            "boa_token": "<img>",
            "eoa_token": "</img>",
        },
    ),
    "glm46v": glm("glm46v", "Glm46V", **rotary(2, 3, 3)),
    "glm4v": glm("glm4v", "Glm4v", **rotary(2, 1, 1, partial_rotary_factor=0.5)),
    "glm4v_moe": glm("glm4v", "Glm4v", **rotary(2, 1, 1, partial_rotary_factor=0.5)),
    "got_ocr2": Spec(
        ("got_ocr2", "GotOcr2", {"size": {"height": 256, "width": 256}}),
        {},
        {
            **ids(image_token_index="<imgpad>"),
            "vision_config.window_size": 8,
            "vision_config.global_attn_indexes": [],
        },
        marker="<imgpad>",
        # An image has always 256 embeddings.
        sizes={"image_size": 256, "patch_size": 4, "output_channels": 16, "mlp_dim": 96},
    ),
    "hyperclovax_vision_v2": Spec(
        ("qwen2_vl", "Qwen2VL", {"size": GRID_SIZE, "patch_size": PATCH}),
        {},
        PLAIN_IDS | WINDOWS,
        marker=MARKED,
        tokens=PLAIN,
        seed=3,
    ),
    "idefics3": Spec(
        ("idefics3", "Idefics3", EDGES),
        {"image_seq_len": 4},
        {**ids(image_token_id="<image>"), "scale_factor": 2},
    ),
    "internvl": Spec(
        ("got_ocr2", "GotOcr2", TILES),
        {"image_seq_length": 4},
        {**ids(image_token_id="<IMG_CONTEXT>"), "image_seq_length": 4},
        marker="<IMG_CONTEXT>",
        sizes=SIDES,
        tokens=INTERNVL,
    ),
    "lighton_ocr": Spec(
        ("pixtral", "Pixtral", PIXTRAL | {"patch_size": 2 * PATCH}),
        {"patch_size": PATCH, "spatial_merge_size": 2},
        ids(image_token_id="<|image|>"),
        marker="<|image|>",
        tokens=PLAIN | {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        seed=3,
    ),
    "llava_next": Spec(
        (
            "llava_next",
            "LlavaNext",
            {
                "size": {"shortest_edge": SIDE},
                "crop_size": SQUARE,
                "image_grid_pinpoints": PINPOINTS,
            },
        ),
        {
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
        },
        {
            **LLAVA_IDS,
            "image_grid_pinpoints": PINPOINTS,
            "vision_feature_layer": -2,
            "image_seq_length": 16,
        },
    ),
    "llava_onevision": Spec(
        (
            "llava_onevision",
            "LlavaOnevision",
            {"size": SQUARE, "image_grid_pinpoints": PINPOINTS},
        ),
        {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "video_token": "<video>",
        },
        {
            **LLAVA_IDS,
            **ids(video_token_id="<video>", video_token_index="<video>"),
            "image_grid_pinpoints": PINPOINTS,
            "vision_feature_layer": -1,
        },
    ),
    "mistral3": Spec(
        ("pixtral", "Pixtral", PIXTRAL),
        {"patch_size": PATCH, "spatial_merge_size": 2},
        ids(image_token_id="[IMG]", image_token_index="[IMG]"),
        marker="[IMG]",
    ),
    "paddleocr_vl": Spec(
        ("paddleocr_vl", "PaddleOCRVL", {"size": GRID_SIZE, "patch_size": PATCH}),
        {},
        PLAIN_IDS | rotary(2, 3, 3),
        marker=MARKED,
        tokens=PLAIN,
    ),
    "qianfan_ocr": Spec(
        ("got_ocr2", "GotOcr2", TILES),
        {"image_seq_length": 4},
        {**ids(image_token_id="<IMG_CONTEXT>"), "image_seq_length": 4},
        sizes=SIDES,
        tokens=INTERNVL,
    ),
    "qwen3_5": qwen3_5(),
    "qwen3_5_moe": qwen3_5(),
    "smolvlm": Spec(
        ("smolvlm", "SmolVLM", EDGES),
        {"image_seq_len": 4},
        {**ids(image_token_id="<image>"), "scale_factor": 2},
    ),
    "vipllava": Spec(
        ("clip", "CLIP", {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}),
        {
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
        },
        {**LLAVA_IDS, "vision_feature_layer": [-1, -2, 1], "image_seq_length": 16},
    ),
}


def make_config(model_type: str, sizes: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """Return a small config; `settings` have dotted keys."""
    config = _shrink(CONFIG_MAPPING[model_type]().to_dict(), SIZES | dict(sizes or {}))
    for dotted, value in settings.items():
        *sections, key = dotted.split(".")
        section = config
        for name in sections:
            section = section[name]
        section[key] = value
    return CONFIG_MAPPING[model_type](**config)


def _shrink(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key not in ("rope_parameters", "id2label", "label2id"):
            small[key] = _shrink(value, sizes)
        elif key in ("layer_types", "mlp_layer_types") and value is not None:
            small[key] = value[: sizes["num_hidden_layers"]]
        else:
            small[key] = sizes[key] if key in sizes and value is not None else value
    return small


def make_tokenizer(spec: Spec, merged: str = "") -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and one for two equal letters if `merged`."""
    symbols = TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(letter, letter) for letter in merged or spec.merged]
    symbols += [first + second for first, second in merges]
    model = models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", **special, extra_special_tokens=spec.tokens
    )
    wrapped.chat_template = TEMPLATE.replace("IMAGE", spec.marker)
    return wrapped


def write_files(
    folder: Path, model_type: str, merged: str = "", sizes: Mapping[str, Any] | None = None
) -> Any:
    """Write a folder without weights, and return its config, with other `sizes` on request."""
    spec = SPECS[model_type]
    make_tokenizer(spec, merged).save_pretrained(folder)
    module, name, settings = spec.image_processor
    processors = importlib.import_module(
        f"transformers.models.{module}.image_processing_pil_{module}"
    )
    getattr(processors, f"{name}ImageProcessorPil")(**settings).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(spec.processor))
    config = make_config(model_type, spec.sizes | dict(sizes or {}), **spec.config)
    config.save_pretrained(folder)
    return config


def write_folder(folder: Path, model_type: str) -> PreTrainedModel:
    """Write a folder with weights in float64, and return the model."""
    config = write_files(folder, model_type)
    model = draw_model(config, SPECS[model_type].seed)
    model.save_pretrained(folder)
    return model


def draw_model(config: Any, seed: int = 8) -> PreTrainedModel:
    """Return a model in float64, with all parameters drawn."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", dtype=torch.float64
    )
    model.eval().requires_grad_(False)
    model.set_experts_implementation("eager")
    widen(model, seed)
    move_vectors(model)
    return model
