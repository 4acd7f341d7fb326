"""Model types without a family of their own, token for token in float64, through the generic path.

A type is one line of SPECS: its name, and the settings that its tiny model needs beyond SIZES.
"""

import copy
import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shared.models.generic import TESTED_TYPES
from shared.models.registry import adapt, find_source
from tests.engine.model.test_parity import (
    RandomSchedule,
    Twins,
    answers_of,
    make_case,
    make_cases,
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
    "num_hidden_layers": 4,
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

SPECS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "arcee": {},
    "beam": {},
    "cohere": {},
    "cohere2_moe": {},
}


def build(model_type: str, **settings: Any) -> PreTrainedModel:
    """Return a tiny model in float64, with all parameters drawn."""
    default = AutoConfig.for_model(model_type).get_text_config(decoder=True)
    sizes = {key: value for key, value in SIZES.items() if getattr(default, key, None) is not None}
    config = AutoConfig.for_model(default.model_type, **(sizes | SPECIAL | settings))
    torch.manual_seed(0)
    # In SDPA transformers leaves soft caps out.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float64
    )
    model.eval().requires_grad_(False)
    model.set_experts_implementation("eager")
    widen(model, seed=8)
    move_vectors(model)
    return model


def move_vectors(model: PreTrainedModel) -> None:
    """Move the vectors that begin as zeros or ones: a feature may be hidden by such a vector."""
    generator = torch.Generator().manual_seed(6)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith("bias"):
            noise = torch.empty_like(parameter).normal_(0, 0.3, generator=generator)
            parameter.data.add_(noise)


@pytest.fixture(scope="module", params=SPECS)
def twins(request: pytest.FixtureRequest) -> Twins:
    model = build(request.param, **SPECS[request.param])
    return Twins(model, FlatModel(adapt(copy.deepcopy(model))), None)


@pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"),
    [
        pytest.param(100, 0.0, 16, id="whole prompts", marks=pytest.mark.long),
        pytest.param(5, 0.1, 1, id="chunks of 5, blocks of 1"),
    ],
)
def test_any_schedule_yields_the_tokens_of_generate(
    twins: Twins, max_chunk: int, preempt_share: float, block_size: int
) -> None:
    cases = [*make_cases(False), make_case("long", [], 60, 20)]
    rng = random.Random(max_chunk)
    schedule = RandomSchedule(rng, 320 // block_size, block_size, max_chunk, preempt_share)
    assert run_schedule(twins, cases, schedule) == answers_of(twins, cases)


def test_windows_are_shorter_than_the_prompts(twins: Twins) -> None:
    windows = layer_windows(twins.served.family.decoder.config)
    assert all(window is None or window <= 20 for window in windows)


def test_each_tested_type_has_a_spec() -> None:
    assert set(SPECS) == TESTED_TYPES
    sources = {find_source(AutoConfig.for_model(model_type)) for model_type in SPECS}
    assert sources == {"generic"}
