"""Models that are refused when they are loaded, and the reasons."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shared.errors import ConfigError
from shared.models.registry import list_text_model_types
from workers.engine.model.support import check_supported

FOLDER = Path("models") / "some"
MROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "mrope_section": [2, 3, 3]}


def refuse(model_type: str, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError, match="some") as caught:
        check_supported(AutoConfig.for_model(model_type, **settings), FOLDER)
    assert caught.value.field == "models.path"
    return caught.value.message


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("t5", {}, "cross attention"),
        ("bart", {}, "cross attention"),
        ("mllama", {}, "cross attention"),
        ("mamba", {}, "keeps a state"),
        ("mamba2", {}, "keeps a state"),
        ("falcon_mamba", {}, "keeps a state"),
        ("rwkv", {}, "keeps a state"),
        ("xlstm", {}, "keeps a state"),
        ("recurrent_gemma", {}, "keeps a state"),
        ("jamba", {}, "states of a form"),
        ("zamba2", {}, "states of a form"),
        ("kimi_linear", {}, "states of a form"),
        ("bamba", {}, "no layer with attention"),
        ("lfm2", {"layer_types": ["conv"] * 32}, "no layer with attention"),
        ("bamba", {"attn_layer_indices": [1], "time_step_limit": (0.0, 0.1)}, "time steps"),
        ("llama4_text", {}, "chunked_attention"),
        ("llama", {"sliding_window": 4}, "sliding window"),
        ("bloom", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        (
            "llama",
            {"per_layer_config": {0: {"intermediate_size": 64}}},
            "differ in intermediate_size",
        ),
        ("llama", {"per_layer_config": {0: {"num_key_value_heads": 1}}}, "num_key_value_heads"),
        ("gemma3n", {}, "the package timm"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "bidirectional"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("qwen2", {"is_causal": False}, "bidirectional"),
        ("qwen2_vl", {"is_causal": False}, "bidirectional"),
        ("qwen2_vl", {"text_config": {"is_causal": False}}, "bidirectional"),
        ("llama", {"rope_parameters": MROPE}, "dynamic rotary"),
        ("gemma3_text", {"rope_parameters": {"full_attention": MROPE}}, "dynamic rotary"),
        ("qwen2_vl", {"text_config": {"rope_parameters": MROPE}}, "dynamic rotary"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "is a classifier"),
        ("bert", {}, "no family: models of this type are encoders"),
        ("gptj", {}, "no family: transformers' model of this type runs with no other attention"),
        ("ovis2", {}, "no family: embeddings replace more tokens"),
        ("clip", {}, "no family: transformers has no causal language model of this type"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(
    model_type: str, settings: dict[str, Any], reason: str
) -> None:
    assert reason in refuse(model_type, settings)


@pytest.mark.parametrize("model_type", list_text_model_types())
def test_text_families_are_supported(model_type: str) -> None:
    check_supported(AutoConfig.for_model(model_type), FOLDER)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"])
def test_families_that_see_are_taken_as_they_come(model_type: str) -> None:
    check_supported(AutoConfig.for_model(model_type), FOLDER)
