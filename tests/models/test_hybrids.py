"""Hybrid models, token for token in float64: recurrent layers with a state for each sequence.

A type is one line of SPECS, as in `test_generic`.
"""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from shared.errors import ConfigError
from shared.models.generic import TESTED_TYPES
from shared.models.registry import adapt, find_source
from shared.models.states import count_state_bytes
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import (
    Case,
    CountingRunner,
    RandomSchedule,
    Twins,
    answers_of,
    make_case,
    run_core,
    run_sampled,
    run_schedule,
)
from tests.models import test_generic
from tests.models.test_generic import build
from tests.support.engine import make_core
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.sequence import EngineRequest, LoggedChoice
from workers.engine.model import states
from workers.engine.model.flat_model import FlatModel, StepInputs
from workers.engine.model.self_check import check_against_whole
from workers.engine.model.states import LayerStates, StatePool, StateStep

pytestmark = pytest.mark.usefixtures("one_thread")

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
SPECS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen3_next": DELTA,
    "olmo_hybrid": DELTA,
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 12,
        "n_groups": 2,
        "chunk_size": 8,
    },
}


ALWAYS = "qwen3_5_text"


def make_twins(model_type: str) -> Twins:
    model = build(model_type, **SPECS[model_type])
    return Twins(model, FlatModel(adapt(copy.deepcopy(model))), None)


@pytest.fixture(
    scope="module",
    params=[pytest.param(t, marks=() if t == ALWAYS else pytest.mark.long) for t in SPECS],
)
def twins(request: pytest.FixtureRequest) -> Twins:
    return make_twins(request.param)


@pytest.fixture(scope="module")
def qwen() -> Twins:
    return make_twins(ALWAYS)


def make_cases() -> list[Case]:
    return [
        make_case("text", [], 23, 12),
        make_case("long", [], 70, 10),
        make_case("short", [], 1, 14),
    ]


SCHEDULES = pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"),
    [
        pytest.param(100, 0.0, 16, id="whole prompts"),
        pytest.param(5, 0.1, 1, id="chunks of 5, blocks of 1"),
    ],
)


@SCHEDULES
def test_any_schedule_yields_the_tokens_of_generate(
    twins: Twins, max_chunk: int, preempt_share: float, block_size: int
) -> None:
    cases = make_cases()
    rng = random.Random(max_chunk)
    schedule = RandomSchedule(rng, 256 // block_size, block_size, max_chunk, preempt_share)
    assert run_schedule(twins, cases, schedule) == answers_of(twins, cases)
    assert (schedule.num_preemptions > 0) == (preempt_share > 0)


def test_each_tested_type_has_a_spec() -> None:
    assert SPECS.keys() | test_generic.SPECS.keys() == TESTED_TYPES
    sources = {find_source(AutoConfig.for_model(model_type)) for model_type in TESTED_TYPES}
    assert sources == {"generic"}


@pytest.mark.parametrize("model_type", SPECS)
def test_the_pool_has_the_size_of_the_report(model_type: str) -> None:
    decoder: Any = build(model_type, **SPECS[model_type]).float().base_model
    tensors = [t for _, layer in StatePool(decoder, 3)._layers for t in layer.tensors()]
    assert sum(t.nbytes for t in tensors) == 3 * count_state_bytes(decoder.config) > 0


def test_answers_depend_on_the_states(qwen: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = make_cases()
    monkeypatch.setattr(StateStep, "commit", lambda self: None)
    schedule = RandomSchedule(random.Random(1), 16, 16, 100, 0.0)
    answers = run_schedule(qwen, cases, schedule)
    assert all(answers[name] != expected for name, expected in answers_of(qwen, cases).items())


class ForgottenInputs(LayerStates):
    """States without the last inputs of the convolution."""

    def update_conv_state(self, inputs: Tensor, layer_idx: int, conv_kernel_size: int) -> Tensor:
        joined = super().update_conv_state(inputs, layer_idx, conv_kernel_size)
        self.conv.zero_()
        return joined


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "model_type", [ALWAYS, *(pytest.param(t, marks=pytest.mark.long) for t in SPECS if t != ALWAYS)]
)
def test_models_whose_states_are_lost_are_refused(
    model_type: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder: Any = build(model_type, **SPECS[model_type])
    model = FlatModel(adapt(decoder.to(dtype)))
    check_against_whole(model, 8)
    with monkeypatch.context() as patch:
        patch.setattr(states, "LayerStates", ForgottenInputs)
        with pytest.raises(ConfigError, match="differ from transformers'"):
            check_against_whole(model, 8)
    monkeypatch.setattr(StateStep, "commit", lambda self: None)
    with pytest.raises(ConfigError, match="differ from transformers'"):
        check_against_whole(model, 8)


# -- through the real scheduler, pool and preemption ----------------------------------------------


@pytest.mark.parametrize("steps_between", [0, 5], ids=["at once", "joining later"])
@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("num_blocks", [64, 22], ids=["roomy", "preempted"])
def test_core_yields_the_tokens_of_generate(
    qwen: Twins, budget: int, steps_between: int, num_blocks: int
) -> None:
    cases = make_cases()
    answers, runner = run_core(
        qwen,
        cases,
        num_blocks=num_blocks,
        budget=budget,
        steps_between=steps_between,
        max_model_len=88,
    )
    assert answers == answers_of(qwen, cases)
    assert max(runner.batch_sizes) > 1
    assert (max(runner.num_starts.values()) > 1) == (num_blocks == 22)


def test_choices_resume_identically_at_any_token(qwen: Twins) -> None:
    """Choices compute their prompt separately, also after a preemption and a resume."""
    params = SamplingParams(n=3, temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)
    requests = [replace(case.request, sampling=params) for case in make_cases()[::2]]
    whole: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        whole |= run_sampled(qwen, [request], 200, 512, 0)[0]
    assert len({tuple(answer) for answer in whole.values()}) == len(whole)
    rng = random.Random(2)
    resumed, left = [], {}
    for request in requests:
        logged = []
        for choice in range(params.n):
            answer = whole[request.request_id, choice]
            cut = rng.randint(0, len(answer) - 1)
            logged.append(LoggedChoice(answer[:cut], False))
            left[request.request_id, choice] = answer[cut:]
        resumed.append(replace(request, logged=logged))
    answers, runner = run_sampled(qwen, resumed, 20, 31, 0)
    assert answers == left
    assert max(runner.num_starts.values()) > params.n


BAD_TOKEN = 198


@pytest.mark.parametrize("moves_early", [False, True], ids=["", "control"])
def test_a_failed_step_changes_no_states(
    moves_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request fails in the batch of two others, and a third one gets its slot."""
    qwen = make_twins(ALWAYS)
    qwen.served.family.input_embeddings.weight[BAD_TOKEN] = torch.nan
    if moves_early:
        forward = FlatModel.forward

        def forward_and_commit(self: FlatModel, step: StepInputs) -> Tensor:
            logits = forward(self, step)
            step.states.commit()
            return logits

        monkeypatch.setattr(FlatModel, "forward", forward_and_commit)
    first, second, late = (make_case(name, [], 9, 12) for name in ("a", "b", "c"))
    params = SamplingParams(temperature=0, max_tokens=4)
    bad = EngineRequest("bad", [5, BAD_TOKEN, 7], [], params)
    runner = CountingRunner(qwen, 64, 4)
    core = make_core(
        runner,
        BlockPool(64, 4),
        qwen.served.vocab_size,
        max_num_seqs=3,
        keeps_states=True,
    )
    answers: dict[str, list[int]] = {case.request.request_id: [] for case in (first, second, late)}
    failed = []
    for request in (first.request, second.request):
        core.add(request)
    for step in range(30):
        if step == 4:
            core.add(bad)
            core.add(late.request)
        for output in core.step():
            if output.error is not None:
                failed.append(output.request_id)
            for delta in output.choices:
                answers[output.request_id] += delta.token_ids
    assert not core.has_work
    assert failed == ["bad"]
    assert runner.batch_sizes[4:7] == [3, 1, 2]
    expected = answers_of(qwen, [first, second, late])
    assert answers["c"] == expected["c"]
    assert (answers == expected) != moves_early
