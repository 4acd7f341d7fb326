"""Adapters written and run by peft itself, token for token, greedy and in float32."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from shared.models.registry import adapt
from shared.models.tower import Tower
from tests.engine.model.test_parity import (
    Case,
    Twins,
    build,
    make_cases,
    reference_answer,
    run_core,
    widen,
)
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.lora import load_adapters

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "scaled": {
        "r": 9,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["o_proj", "up_proj"],
    },
    "patterns": {
        "r": 3,
        "lora_alpha": 7,
        "target_modules": r".*\.layers\.\d\.(self_attn\.[qk]_proj|mlp\.down_proj)",
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 6, "k_proj": 2},
        "alpha_pattern": {"down_proj": 11, r"layers\.0.*": 2},
    },
    "one layer": {
        "r": 5,
        "lora_alpha": 20,
        "target_modules": ["q_proj", "gate_proj"],
        "layers_to_transform": [1],
        "exclude_modules": ["gate_proj"],
    },
}


def train(model: Any, folder: Path, config: dict[str, Any]) -> None:
    """Fill weights that training starts at zero with random numbers, as if trained."""
    tuned = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(config["r"])
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            spread = 0.5 * parameter.shape[1] ** -0.5
            parameter.data.normal_(0, spread, generator=generator)
    tuned.save_pretrained(str(folder))


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen2_vl", marks=pytest.mark.long)])
def test_a_mixed_batch_yields_the_tokens_of_peft(name: str, tmp_path: Path) -> None:
    model = build(name).eval().requires_grad_(False)
    widen(model)
    cases, expected = [], {}
    for adapter, config in CONFIGS.items():
        folder = tmp_path / adapter
        train(model, folder, config)
        reference = copy.deepcopy(model)
        reference.load_adapter(str(folder))
        for case in make_cases(name == "qwen2_vl")[:2]:
            request_id = f"{case.request.request_id} {adapter}"
            request = replace(case.request, request_id=request_id, adapter=adapter)
            cases.append(Case(request, case.images))
            expected[request_id] = reference_answer(reference.eval(), case)
    assert len({tuple(answer) for answer in expected.values()}) == len(cases)
    family = adapt(copy.deepcopy(model))
    adapters = load_adapters(family, {adapter: str(tmp_path / adapter) for adapter in CONFIGS})
    tower = None if family.tower is None else Tower(family.tower, family.model)
    twins = Twins(model, FlatModel(family), tower, adapters=adapters)
    answers, runner = run_core(twins, cases, num_blocks=200, budget=31, steps_between=0)
    assert answers == expected
    assert max(runner.batch_sizes) > 2
