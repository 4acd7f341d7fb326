"""Adapters that would answer differently than in peft are refused, with file and key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models.registry import adapt
from tests.adapters import write_adapter
from tests.engine.model.test_parity import build, folder
from workers.engine.loader import load
from workers.engine.model.lora import load_adapters
from workers.engine.model.peft_format import LoraWeights, read_adapter

__all__ = ["folder"]  # a fixture

Q = "model.language_model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{Q}"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("qwen2_vl")


@pytest.fixture
def adapter(model: PreTrainedModel, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", model, ["q_proj"], 4, 6, 1)


def read(model: PreTrainedModel, adapter: Path) -> dict[str, LoraWeights]:
    return read_adapter("mine", adapter, model, ("model.visual",))


def configure(adapter: Path, **config: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def change(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def refusal(model: PreTrainedModel, adapter: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(model, adapter)
    assert caught.value.field == "models.adapters.mine"
    assert str(adapter) in caught.value.message
    return caught.value.message


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / 2),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 1}}, 1 / 4),
        ({"alpha_pattern": {r"layers\.[02].*q_proj": 8, "q_proj": 3}}, 8 / 4),
        ({"alpha_pattern": {"self_attn": 1}}, 6 / 4),
        ({"alpha_pattern": {"j_proj": 1, "proj": 1}}, 6 / 4),
        ({"alpha_pattern": None, "rank_pattern": None}, 6 / 4),
    ],
)
def test_scales_follow_the_config(
    model: PreTrainedModel, adapter: Path, config: dict[str, Any], scale: float
) -> None:
    configure(adapter, **config)
    tensors = load_file(adapter / "adapter_model.safetensors")
    low_rank = read(model, adapter)[Q]
    assert torch.equal(low_rank.a, tensors[f"{KEY}.lora_A.weight"])
    torch.testing.assert_close(low_rank.b, tensors[f"{KEY}.lora_B.weight"] * scale)


def test_ranks_of_single_layers(model: PreTrainedModel, adapter: Path) -> None:
    configure(adapter, rank_pattern={"layers.0.self_attn.q_proj": 2})
    change(
        adapter,
        lambda tensors: tensors.update(
            {f"{KEY}.lora_A.weight": torch.ones(2, 64), f"{KEY}.lora_B.weight": torch.ones(64, 2)}
        ),
    )
    weights = read(model, adapter)
    assert weights[Q].b.unique().tolist() == [6 / 2]
    assert [len(low_rank.a) for low_rank in weights.values()] == [2, 4, 4]


@pytest.mark.parametrize(
    "targets", [None, "all-linear", r".*language_model.*\.q_proj", ["q_proj", "v_proj"], [Q[:-1]]]
)
def test_targets(model: PreTrainedModel, adapter: Path, targets: Any) -> None:
    configure(adapter, target_modules=targets)
    if targets == [Q[:-1]]:
        assert "target_modules" in refusal(model, adapter)
    else:
        assert len(read(model, adapter)) == 3


def test_names_of_older_transformers(model: PreTrainedModel, adapter: Path) -> None:
    """When the language model of Qwen2-VL lay a level higher."""
    now = read(model, adapter)

    def move(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("language_model.", "")] = tensors.pop(key)

    change(adapter, move)
    configure(adapter, target_modules=r"model\.layers.*q_proj")
    before = read(model, adapter)
    assert before.keys() == now.keys()
    assert all(torch.equal(before[name].b, now[name].b) for name in now)


def test_a_model_in_another_dtype(adapter: Path) -> None:
    weights = read(build("qwen2_vl").bfloat16(), adapter)
    assert {low_rank.b.dtype for low_rank in weights.values()} == {torch.bfloat16}


# -- rejected adapters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, ["peft_type", "IA3"]),
        ({"use_dora": True}, ["use_dora", "plain LoRA"]),
        ({"bias": "all"}, ["bias", "all"]),
        ({"bias": "lora_only"}, ["bias", "lora_only"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out"]),
        ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices"]),
        ({"target_parameters": ["experts"]}, ["target_parameters"]),
        ({"layer_replication": [[0, 2], [1, 3]]}, ["layer_replication"]),
        ({"something_of_next_year": 3}, ["something_of_next_year", "plain LoRA"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights", "pissa"]),
        ({"r": 0}, ["r", "at least 1"]),
        ({"r": "four"}, ["r:", "a whole number"]),
        ({"r": 5}, ["q_proj", "[4, 64]", "[5, 64]"]),
        ({"lora_alpha": None}, ["lora_alpha"]),
        ({"rank_pattern": {"q_proj": -1}}, ["rank_pattern", "at least 1"]),
        ({"rank_pattern": {"(": 1}}, ["'('", "regular expression"]),
        ({"target_modules": "("}, ["'('", "regular expression"]),
        ({"target_modules": ["v_proj"]}, ["target_modules", "q_proj"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_settings(
    model: PreTrainedModel, adapter: Path, config: dict[str, Any], named: list[str]
) -> None:
    configure(adapter, **config)
    message = refusal(model, adapter)
    assert all(part in message for part in ["adapter", *named])


LOW_RANK = {"lora_A.weight": torch.zeros(4, 64), "lora_B.weight": torch.zeros(64, 4)}


@pytest.mark.parametrize(
    ("module", "tensors", "named"),
    [
        (Q, {"lora_magnitude_vector": torch.ones(64)}, "linear layers"),
        (Q, {"lora_B.bias": torch.ones(64)}, "linear layers"),
        ("model.language_model.embed_tokens", {"lora_embedding_A": torch.ones(4, 199)}, "linear"),
        ("model.language_model.embed_tokens", LOW_RANK, "Embedding"),
        ("lm_head", LOW_RANK, "head"),
        ("lm_head", {"base_layer.weight": torch.ones(199, 64)}, "linear layers"),
        ("model.visual.blocks.0.attn.qkv", LOW_RANK, "tower"),
        ("visual.blocks.0.attn.qkv", LOW_RANK, "tower"),
        ("model.language_model.layers.7.self_attn.q_proj", LOW_RANK, "has no"),
        ("model.language_model.layers.0.self_attn", LOW_RANK, "Attention"),
        ("model.language_model.layers.0.mlp.experts.1.up_proj", LOW_RANK, "every token"),
        (Q, {"lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}, "int8"),
        (Q, {"lora_A.weight": torch.ones(4, 64).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        (Q, {"lora_A.weight": torch.ones(4, 63)}, "[4, 63]"),
        (Q, {"lora_B.weight": torch.ones(4, 64)}, "[64, 4]"),
        (Q, {"lora_B.weight": torch.full((64, 4), torch.nan)}, "not finite"),
        (Q, {"lora_A.weight": None}, "has no"),
    ],
)
def test_weights(
    model: PreTrainedModel, adapter: Path, module: str, tensors: dict[str, Any], named: str
) -> None:
    def edit(saved: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            key = f"base_model.model.{module}.{name}"
            saved.pop(key, None)
            if tensor is not None:
                saved[key] = tensor.clone()

    configure(adapter, target_modules=None)
    change(adapter, edit)
    message = refusal(model, adapter)
    assert module in message
    assert named in message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_missing_or_broken(model: PreTrainedModel, adapter: Path, name: str) -> None:
    for damage in (lambda f: f.write_bytes(f.read_bytes()[:-9]), lambda f: f.unlink()):
        damage(adapter / name)
        assert name in refusal(model, adapter)


def test_an_adapter_without_weights(model: PreTrainedModel, adapter: Path) -> None:
    change(adapter, lambda tensors: tensors.clear())
    assert "empty" in refusal(model, adapter)


def test_adapters_of_the_tower_are_rejected_where_encoders_run_it(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path, model, ["attn.qkv"], 2, 2, 1)
    with pytest.raises(ConfigError, match="tower"):
        load_adapters(adapt(model), {"mine": str(adapter)})


# -- through the loader ---------------------------------------------------------------------------


def test_the_loader_lists_the_adapters(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, build("qwen2"), ["q_proj"], 2, 2, 1)
    engine = EngineConfig(kv_cache_mib=2)
    loaded = load(ModelConfig(str(folder), adapters={"mine": str(adapter)}), engine)
    assert loaded.adapters
    assert not load(ModelConfig(str(folder)), engine).adapters
    with pytest.raises(ConfigError, match="adapter_config") as caught:
        load(ModelConfig(str(folder), adapters={"mine": str(tmp_path / "nowhere")}), engine)
    assert caught.value.field == "models.adapters.mine"
