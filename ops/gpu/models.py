"""Tiny models of the families, with random weights, and prompts with images for them."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import EngineRequest, Item

VOCAB_SIZE, MAX_POSITIONS = 512, 256
IMAGE, VIDEO, VISION_START = 498, 497, 496
NUM_TEXT_IDS = 490
"""Ids below the ids of special tokens."""
PATCH_SIZE, MERGED_PATCHES = 14, 4

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {"head_dim": 16, "rope_parameters": _MROPE | {"mrope_interleaved": True}}
_VISION: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH_SIZE}
_WIDE = _VISION | {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
_DEEPSTACK = _WIDE | {"depth": 3, "deepstack_visual_indexes": [0, 2]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START}

# Family: transformers' name and what its configuration changes.
_TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 9}),
    "gemma3_text": ("Gemma3Text", {"head_dim": 32, "sliding_window": 9}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
    "smollm3": ("SmolLM3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | {"head_dim": 32}),
}
# Family: transformers' name, and what the configurations of text and vision change.
_SEEING_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {}, _VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": ("Qwen2_5_VL", {}, _WIDE | {"window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ("Qwen3VL", _INTERLEAVED, _DEEPSTACK),
    "qwen3_vl_moe": ("Qwen3VLMoe", _INTERLEAVED | _EXPERTS, _DEEPSTACK),
}
SEEING = tuple(_SEEING_MODELS)
FAMILIES = (*_TEXT_MODELS, *SEEING)


def build(name: str, **vision_changes: Any) -> PreTrainedModel:
    """Return a model of a family. Configurations that this transformers lacks fail only here."""
    if name in _TEXT_MODELS:
        prefix, changes = _TEXT_MODELS[name]
        config = getattr(transformers, f"{prefix}Config")(**TEXT | changes)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    else:
        prefix, text, vision = _SEEING_MODELS[name]
        config = getattr(transformers, f"{prefix}Config")(
            text_config=TEXT | {"rope_parameters": _MROPE} | text,
            vision_config=vision | vision_changes,
            **_IDS,
        )
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    built: PreTrainedModel = model.eval().requires_grad_(False)
    return built


def widen(model: PreTrainedModel) -> None:
    """Enlarge the initial weights, so that different prompts yield different tokens."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Experts are stacked.
            num_inputs = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
            parameter.data.normal_(0, 2.0 * num_inputs**-0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.3, generator=generator)
        else:
            parameter.data.add_(
                torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator)
            )


def image_fields(height: int, width: int) -> dict[str, Tensor]:
    """Return the fields of a random image of `height` x `width` patches."""
    generator = torch.Generator().manual_seed(height)
    shape = (height * width, 3, PATCH_SIZE**2)
    return {
        "pixel_patches": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
        "pixel_table": torch.randn(3, 256, generator=generator),
        "image_grid_thw": torch.tensor([1, height, width]),
    }


def text_request(number: int, length: int, sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(f"text-{number}", _words(length, number), [], sampling)


def image_request(
    number: int, sizes: list[tuple[int, int]], sampling: SamplingParams
) -> EngineRequest:
    """Return a request with words, and an image of each size followed by words."""
    token_ids, items = _words(7, number), []
    for i, (height, width) in enumerate(sizes):
        fields = image_fields(height, width)
        length = height * width // MERGED_PATCHES
        placeholder = PlaceholderRange(len(token_ids) + 1, length)
        items.append(Item("image", f"{height}x{width}", placeholder, fields))
        token_ids += [VISION_START, *[IMAGE] * length, *_words(5, i + 1)]
    return EngineRequest(f"image-{number}", token_ids, items, sampling)


def _words(length: int, seed: int) -> list[int]:
    return [(7 * seed + 13 * i) % NUM_TEXT_IDS for i in range(length)]
