"""Further text families, token for token, with attention windows where they have them."""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shared.errors import InvalidRequest
from shared.models.registry import adapt, list_text_model_types
from shared.protocol.multimodal import PlaceholderRange
from tests.engine.model.test_parity import (
    TEXT,
    Case,
    RandomSchedule,
    Twins,
    answers_of,
    from_afar,
    make_case,
    make_cases,
    make_twins,
    reference_answer,
    run_core,
    run_schedule,
    widen,
)
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.support import layer_windows
from workers.engine.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# Windows smaller than the prompts (23 tokens), than a chunk, and than a block of 16.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 2.0}),
    "gemma2 without caps": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 6, "layer_types": MIXED}),
    "mistral with a window": ("mistral", {"sliding_window": 9}),
    "mistral, window of two tokens": ("mistral", {"sliding_window": 2}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": 11}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": 8, "pad_token_id": 0}),
    "qwen2, windows from a layer on": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2 of mixed layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": MIXED},
    ),
    "qwen2_moe": ("qwen2_moe", EXPERTS),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 24}),
    "qwen3_moe with a window": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 24, "use_sliding_window": True, "sliding_window": 10},
    ),
    "smollm3": ("smollm3", {"pad_token_id": 0}),
}


def build(model_type: str, settings: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **TEXT, **settings, tie_word_embeddings=False)
    # In SDPA transformers leaves soft caps out.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval().requires_grad_(False)
    return model


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=list(SETTINGS))
def twins(request: pytest.FixtureRequest) -> Twins:
    model = build(*request.param)
    widen(model, seed=8)
    return Twins(model, FlatModel(adapt(copy.deepcopy(model))), None)


# One of each kind of attention and of layers; `test_core_yields_the_tokens_of_generate` has all.
SCHEDULED = ("gemma2", "gemma3_text", "mistral with a window", "qwen3_moe")


@pytest.mark.parametrize(
    "twins",
    [
        pytest.param(settings, id=name, marks=() if name in SCHEDULED else pytest.mark.long)
        for name, settings in SETTINGS.items()
    ],
    indirect=True,
)
@pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"),
    [
        pytest.param(100, 0.0, 16, id="whole prompts", marks=pytest.mark.long),
        pytest.param(7, 0.05, 4, id="chunks of 7", marks=pytest.mark.long),
        pytest.param(5, 0.05, 1, id="chunks of 5, blocks of 1"),
    ],
)
def test_any_schedule_yields_the_tokens_of_generate(
    twins: Twins, max_chunk: int, preempt_share: float, block_size: int
) -> None:
    cases = [*make_cases(False), make_case("long", [], 60, 12)]
    rng = random.Random(max_chunk)
    schedule = RandomSchedule(rng, 320 // block_size, block_size, max_chunk, preempt_share)
    assert run_schedule(twins, cases, schedule) == answers_of(twins, cases)


def test_core_yields_the_tokens_of_generate(twins: Twins) -> None:
    cases = make_cases(False)
    answers, runner = run_core(twins, cases, num_blocks=64, budget=13, steps_between=3)
    assert answers == answers_of(twins, cases)
    assert max(runner.batch_sizes) > 1


def test_each_text_family_has_a_test() -> None:
    tested = {model_type for model_type, _ in SETTINGS.values()} | {"llama", "qwen3"}
    assert sorted(tested) == list_text_model_types()


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral with a window", [9, 9, 9]),
        ("mistral without a window", [None, None, None]),
        ("qwen2, windows from a layer on", [None, 5, 5]),
        ("qwen2 of mixed layers", [20, None, 20]),
        ("gemma3_text", [6, None, 6]),
    ],
)
def test_each_layer_has_its_window(name: str, windows: list[int | None]) -> None:
    model_type, settings = SETTINGS[name]
    assert layer_windows(AutoConfig.for_model(model_type, **TEXT, **settings)) == windows


@pytest.mark.parametrize("name", ["mistral with a window", "qwen2 of mixed layers", "gemma2"])
def test_windows_and_caps_are_felt(name: str) -> None:
    """Without them the same weights answer otherwise, or the tests above would prove little."""
    model_type, settings = SETTINGS[name]
    without = {"sliding_window": 4096, "attn_logit_softcapping": None}
    answers = []
    for changed in (settings, {**settings, **without}):
        model = build(model_type, changed)
        widen(model)
        token_ids = torch.arange(40)[None]
        answers.append(model(input_ids=token_ids).logits[0, -1])
    with_them, without_them = answers
    assert not torch.allclose(with_them, without_them, atol=1e-2)


# -- further levels of features (DeepStack) -------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_vl_moe"])
def deep(request: pytest.FixtureRequest) -> Twins:
    return make_twins(request.param)


def with_embeddings(case: Case, change: Any) -> Case:
    """The case with embeddings as an encoder sends them, after `change`."""
    items = [replace(item, embedding=change(item.embedding)) for item in case.request.items]
    return Case(replace(case.request, items=items), case.images)


@pytest.mark.parametrize("max_chunk", [100, 5])
def test_levels_are_felt_also_where_a_chunk_cuts_the_image(deep: Twins, max_chunk: int) -> None:
    assert deep.tower is not None
    case = from_afar(make_case("one", [(90, 60)], 9, 24), deep.tower)
    (item,) = case.request.items
    assert item.placeholder.length > 5
    hidden_size = TEXT["hidden_size"]

    def run(change: Any) -> list[int]:
        schedule = RandomSchedule(random.Random(1), 64, 4, max_chunk, 0.0)
        twins = replace(deep, tower=None)
        return run_schedule(twins, [with_embeddings(case, change)], schedule)["one"]

    def without_levels(embedding: torch.Tensor) -> torch.Tensor:
        return embedding.clone().index_fill_(1, torch.arange(hidden_size, 3 * hidden_size), 0)

    def exchanged(embedding: torch.Tensor) -> torch.Tensor:
        pooled, first, second = embedding.split(hidden_size, dim=1)
        return torch.cat([pooled, second, first], dim=1)

    expected = reference_answer(deep.reference, case)
    assert run(torch.clone) == expected
    assert run(without_levels) != expected
    assert run(exchanged) != expected


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e[:, : TEXT["hidden_size"]],
        lambda e: e[:, :-1],
        lambda e: e[:-1],
        lambda e: e.view(-1, 3, TEXT["hidden_size"]),
        lambda e: e.long(),
        lambda e: e.clone().index_fill_(1, torch.tensor([TEXT["hidden_size"] + 3]), torch.nan),
        lambda e: e.clone().index_fill_(1, torch.tensor([0]), torch.inf),
    ],
    ids=["no levels", "narrow", "short", "shape", "whole numbers", "nan in a level", "inf"],
)
def test_embeddings_that_do_not_fit_are_the_requests_own_failure(deep: Twins, change: Any) -> None:
    assert deep.tower is not None
    case = from_afar(make_case("one", [(90, 60)], 4, 4), deep.tower)
    runner = ModelRunner(deep.served, num_blocks=4, block_size=4)
    runner.check(case.request)
    with pytest.raises(InvalidRequest, match="embeddings"):
        runner.check(with_embeddings(case, change).request)


def test_placeholders_that_do_not_fit_are_the_requests_own_failure(deep: Twins) -> None:
    case = make_case("moved", [(56, 56)], 4, 4)
    runner = ModelRunner(deep.served, num_blocks=4, block_size=4, tower=deep.tower)
    (item,) = case.request.items
    offset, length = item.placeholder.offset, item.placeholder.length
    for place in (PlaceholderRange(offset, length + 1), PlaceholderRange(offset - 1, length)):
        with pytest.raises(InvalidRequest):
            runner.check(replace(case.request, items=[replace(item, placeholder=place)]))


def test_features_that_are_not_finite_stay_with_their_image(deep: Twins) -> None:
    """Each value of the table is finite, and what the tower makes of them is not."""
    assert deep.tower is not None
    good, bad = (make_case(name, [(90, 60)], 4, 4).request for name in ("good", "bad"))
    table = torch.full((3, 256), 3e38)
    (item,) = bad.items
    bad = replace(bad, items=[replace(item, fields={**item.fields, "pixel_table": table})])
    runner = ModelRunner(deep.served, num_blocks=4, block_size=4, tower=deep.tower)
    for request in (good, bad):
        runner.prepare(request)
    with pytest.raises(InvalidRequest, match="finite"):
        runner.encode([(bad, [0])])
    runner.encode([(good, [0])])
