"""Model types without a family of their own, token for token in float64, through the generic path.

A type is one line of SPECS: its name, and the settings that its tiny model needs beyond SIZES.
`make tests-long` runs all of them, and CI runs one of each kind.
"""

import copy
import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shared.models.registry import adapt
from tests.engine.model.test_parity import (
    RandomSchedule,
    Twins,
    answers_of,
    make_case,
    reference_answer,
    run_schedule,
    widen,
)
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.support import layer_windows

pytestmark = pytest.mark.usefixtures("one_thread")

# Each value is set where the config of a type has the key.
SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "dff": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Smaller than prompts and than a block of 16.
    "sliding_window": 7,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "tie_word_embeddings": False,
}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
MIXED = ["sliding_attention", "full_attention"]
FOUR_LAYERS = {"num_hidden_layers": 4}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.4,
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
}
# The last layers use the keys and values of earlier ones, and all layers use the ids of tokens.
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": [*MIXED, *MIXED],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 199,
}

SPECS: dict[str, dict[str, Any]] = {
    "afmoe": FOUR_LAYERS,
    "apertus": {},
    "arcee": {},
    "axk1": LATENT,
    "aria_text": {},
    "beam": FOUR_LAYERS,
    "bitnet": {},
    "cohere": {},
    "cohere2": FOUR_LAYERS,
    "cohere2_moe": FOUR_LAYERS,
    "cohere_compass_text": {
        "layer_types": MIXED,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in MIXED
        },
    },
    "ctrl": {},
    "cwm": {"layer_types": MIXED, "bos_token_id": 1},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT | {"topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "dots1": {"max_window_layers": 1, "n_shared_experts": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": FOUR_LAYERS,
    "exaone_moe": FOUR_LAYERS,
    "flex_olmo": {},
    "flint": {"layer_types": MIXED, "mlp_only_layers": [0]},
    "gemma3n_text": SHARED | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": SHARED | {"global_head_dim": 32},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": LATENT,
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neox": {},
    "gpt_oss": {},
    "granite": MULTIPLIERS,
    "granitemoe": MULTIPLIERS,
    "granite_swa": MULTIPLIERS | {"layer_types": MIXED, "layer_rope_theta": [10000.0, 0.0]},
    "granitemoe_swa": MULTIPLIERS | {"layer_types": MIXED, "layer_rope_theta": [10000.0, 0.0]},
    "granitemoeshared": MULTIPLIERS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": MULTIPLIERS,
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "kolibri1": {"layer_types": MIXED},
    "laguna": {"layer_types": MIXED},
    "mellum": {"layer_types": MIXED},
    "mimo_v2_flash": {"layer_types": MIXED, "num_key_value_heads": 1, "v_head_dim": 12},
    "minicpm3": LATENT,
    "minimax_m2": {},
    "ministral": {"layer_types": MIXED},
    "ministral3": {},
    "nanochat": {},
    "olmo": {},
    "olmo3": FOUR_LAYERS,
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1},
    },
    "phimoe": {"sliding_window": None},
    "seed_oss": {},
    "solar_open": {},
    "starcoder2": {},
    "vaultgemma": {},
    "youtu": LATENT,
}

# Layers with and without windows, latents of keys and values, unequal layers, learned positions,
# sinks, and experts.
ALWAYS = {"cohere2", "deepseek_v3", "gemma4_text", "gpt2", "gpt_oss", "granitemoe"}
TYPES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in SPECS]

# Seeds of the weights of types whose answers repeat a few tokens with the default seed.
DEFAULT_SEED = 8
SEEDS = {
    "apertus": 1,
    "arcee": 1,
    "ctrl": 3,
    "exaone4": 1,
    "gpt2": 2,
    "gpt_bigcode": 1,
    "gpt_neox": 1,
    "granitemoe": 1,
    "jais2": 1,
    "kolibri1": 1,
    "opt": 2,
    "persimmon": 12,
    "starcoder2": 1,
    "youtu": 1,
}


def make_config(model_type: str, **settings: Any) -> PreTrainedConfig:
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config(decoder=True)
    text.allow_global_per_layer_attribute_access = True
    sizes = {key: value for key, value in SIZES.items() if hasattr(text, key)} | SPECIAL
    if text is not default:
        settings["text_config"] = sizes | settings["text_config"]
        sizes = SPECIAL | {"tie_word_embeddings": False}
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **(sizes | settings))
    return config


def build(model_type: str, **settings: Any) -> PreTrainedModel:
    """Return a tiny model in float64, with all parameters drawn."""
    config = make_config(model_type, **settings)
    torch.manual_seed(0)
    # In SDPA transformers leaves soft caps out.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float64
    )
    model.eval().requires_grad_(False)
    model.set_experts_implementation("eager")
    widen(model, seed=SEEDS.get(model_type, DEFAULT_SEED))
    move_vectors(model)
    return model


def move_vectors(model: PreTrainedModel) -> None:
    """Move the vectors that begin as zeros or ones: a feature may be hidden by such a vector."""
    generator = torch.Generator().manual_seed(6)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith("bias"):
            noise = torch.empty_like(parameter).normal_(0, 0.3, generator=generator)
            parameter.data.add_(noise)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.normal_(1, 0.3, generator=generator)


@pytest.fixture(scope="module", params=TYPES)
def twins(request: pytest.FixtureRequest) -> Twins:
    model = build(request.param, **SPECS[request.param])
    return Twins(model, FlatModel(adapt(copy.deepcopy(model))), None)


@pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"),
    [
        pytest.param(100, 0.0, 16, id="whole prompts"),
        pytest.param(5, 0.1, 1, id="chunks of 5, blocks of 1"),
    ],
)
def test_any_schedule_yields_the_tokens_of_generate(
    twins: Twins, max_chunk: int, preempt_share: float, block_size: int
) -> None:
    cases = [
        make_case("text", [], 23, 12),
        make_case("long", [], 40, 10),
        make_case("short", [], 1, 14),
    ]
    rng = random.Random(max_chunk)
    schedule = RandomSchedule(rng, 128 // block_size, block_size, max_chunk, preempt_share)
    assert run_schedule(twins, cases, schedule) == answers_of(twins, cases)
    assert (schedule.num_preemptions > 0) == (preempt_share > 0)


@pytest.mark.parametrize(
    "model_type", ["flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"]
)
def test_sinks_change_the_answers(model_type: str) -> None:
    model, case = build(model_type, **SPECS[model_type]), make_case("text", [], 23, 12)
    answer = reference_answer(model, case)
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            parameter.fill_(-torch.inf)
    assert reference_answer(model, case) != answer


def test_ids_of_tokens_change_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, case = build("gemma3n_text", **SPECS["gemma3n_text"]), make_case("text", [], 23, 12)
    twins = Twins(model, FlatModel(adapt(copy.deepcopy(model))), None)
    monkeypatch.setattr(twins.served.family, "layer_inputs", lambda token_ids: {})
    schedule = RandomSchedule(random.Random(0), 8, 16, 100, 0.0)
    assert run_schedule(twins, [case], schedule) != answers_of(twins, [case])


@pytest.mark.parametrize("model_type", SPECS)
def test_windows_are_shorter_than_the_prompts(model_type: str) -> None:
    config = make_config(model_type, **SPECS[model_type]).get_text_config(decoder=True)
    windows = set(layer_windows(config))
    # The window that the config names, if any, is the window of some layer.
    assert windows - {None} == {getattr(config, "sliding_window", None)} - {None}
    assert all(window is None or window < 20 for window in windows)
