"""Requests of several adapters and of none in one batch, against models with merged weights."""

import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.errors import UnknownAdapter
from shared.models.registry import adapt
from shared.models.tower import Tower
from tests.adapters import ATTENTION, MLP, merged, write_adapter
from tests.engine.model.test_parity import (
    Case,
    RandomSchedule,
    Twins,
    build,
    make_cases,
    reference_answer,
    run_core,
    run_schedule,
    widen,
)
from tests.engine.model.test_prefix_parity import Engine, case_of, sampled
from workers.engine.core.sequence import LoggedChoice
from workers.engine.model.flat_model import BatchLayout, FlatModel, StepInputs
from workers.engine.model.lora import (
    AdaptedLinear,
    AdapterRun,
    AdapterRuns,
    Adapters,
    load_adapters,
)
from workers.engine.model.peft_format import LoraWeights
from workers.engine.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = (None, "small", "large")


@dataclass(frozen=True)
class Mixed:
    """A model with two adapters of different ranks, and copies with each of them merged."""

    twins: Twins
    references: dict[str | None, PreTrainedModel]

    def cases(self) -> list[Case]:
        """The same prompts for each adapter and for none."""
        return [
            renamed(case, adapter) for case in make_cases(self.twins.sees)[:3] for adapter in NAMES
        ]

    def expected(self, cases: list[Case]) -> dict[str, list[int]]:
        answers = self.twins.answers
        for case in cases:
            request = case.request
            if request.request_id not in answers:
                reference = self.references[request.adapter]
                answers[request.request_id] = reference_answer(reference, case)
        return {case.request.request_id: answers[case.request.request_id] for case in cases}


def renamed(case: Case, adapter: str | None) -> Case:
    name = f"{case.request.request_id} {adapter}"
    return Case(replace(case.request, request_id=name, adapter=adapter), case.images)


def make_mixed(name: str, folder: Path) -> Mixed:
    model = build(name).eval().requires_grad_(False)
    widen(model)
    small = write_adapter(folder / "small", model, ["q_proj", "v_proj", "down_proj"], 3, 7, 1)
    large = write_adapter(
        folder / "large", model, [*ATTENTION, *MLP], 8, 16, 2, spread=0.3, use_rslora=True
    )
    family = adapt(copy.deepcopy(model))
    tower = None if family.tower is None else Tower(family.tower, family.model)
    adapters = load_adapters(family, {"small": str(small), "large": str(large)})
    references = {None: model, "small": merged(model, small), "large": merged(model, large)}
    return Mixed(Twins(model, FlatModel(family), tower, adapters=adapters), references)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen2_vl"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    return make_mixed(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    return make_mixed("qwen2_vl", tmp_path_factory.mktemp("seeing"))


# -- the same tokens as of merged weights ---------------------------------------------------------


def test_every_adapter_answers_differently(mixed: Mixed) -> None:
    answers = mixed.expected(mixed.cases())
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)


@pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"),
    [
        pytest.param(100, 0.0, 16, marks=pytest.mark.long),
        pytest.param(7, 0.0, 4, marks=pytest.mark.long),
        (5, 0.1, 1),
    ],
)
def test_any_schedule_yields_the_tokens_of_merged_weights(
    mixed: Mixed, max_chunk: int, preempt_share: float, block_size: int
) -> None:
    """In any order: the rows of an adapter are several runs."""
    cases = mixed.cases()
    schedule = RandomSchedule(
        random.Random(max_chunk), 600 // block_size, block_size, max_chunk, preempt_share
    )
    assert run_schedule(mixed.twins, cases, schedule) == mixed.expected(cases)
    assert (schedule.num_preemptions > 0) == (preempt_share > 0)


@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("num_blocks", [200, 17], ids=["with room", "preempted"])
def test_core_yields_the_tokens_of_merged_weights(
    mixed: Mixed, num_blocks: int, budget: int
) -> None:
    cases = mixed.cases()
    answers, runner = run_core(
        mixed.twins, cases, num_blocks=num_blocks, budget=budget, steps_between=1
    )
    assert answers == mixed.expected(cases)
    assert max(runner.batch_sizes) > 1
    assert (max(runner.num_starts.values()) > 1) == (num_blocks < 200)


def test_a_resume_continues_with_its_adapter(mixed: Mixed) -> None:
    cases = mixed.cases()
    expected = mixed.expected(cases)
    resumed = []
    for case in cases:
        logged = [LoggedChoice(expected[case.request.request_id][:5], False)]
        resumed.append(Case(replace(case.request, logged=logged), case.images))
    answers, _ = run_core(mixed.twins, resumed, num_blocks=200, budget=64, steps_between=0)
    assert answers == {name: answer[5:] for name, answer in expected.items()}


def test_sampled_choices_equal_an_engine_of_merged_weights(seeing: Mixed) -> None:
    case = sampled(case_of("wide", 1), 5)
    for name, reference in seeing.references.items():
        family = adapt(copy.deepcopy(reference))
        alone = Twins(reference, FlatModel(family), seeing.twins.tower)
        (expected,) = Engine(alone).run(case).values()
        (answer,) = Engine(seeing.twins).run(replace(case, adapter=name)).values()
        assert answer.token_ids == expected.token_ids


# -- sharing between adapters ---------------------------------------------------------------------


def test_no_block_is_shared_between_adapters_and_each_finds_its_own(seeing: Mixed) -> None:
    engine = Engine(seeing.twins, embedding_cache_bytes=2**20)
    hits = []
    for adapter in (None, "small", "large", None, "small", "large"):
        case = renamed(case_of("wide", 1, 2), adapter)
        (answer,) = engine.run(case.request).values()
        assert answer.token_ids == {0: seeing.expected([case])[case.request.request_id]}
        hits.append(answer.cached_tokens > 0)
    assert hits == [False] * 3 + [True] * 3
    assert engine.runner.encoded_items == 1, "the tower is the same for all"


def logits_of(twins: Twins, batch: list[str | None]) -> Tensor:
    """Return the logits of the same three tokens for each sequence, [num_sequences, vocab_size]."""
    model, num = twins.served, len(batch)
    query_start_loc = list(range(0, 3 * num + 1, 3))
    kv_cache = model.new_cache(num, 4)
    assert twins.adapters is not None
    twins.adapters.assign(batch, query_start_loc)
    positions = torch.arange(3).repeat(num).expand(model.family.num_position_rows, -1)
    layout = BatchLayout([[i] for i in range(num)], query_start_loc, [3] * num)
    step = StepInputs(
        model.embed(torch.tensor([5, 6, 7] * num)),
        positions,
        model.plan(layout, kv_cache),
        kv_cache,
        torch.tensor(query_start_loc[1:]) - 1,
    )
    return model.forward(step)


def test_rows_without_an_adapter_are_not_touched(mixed: Mixed) -> None:
    family = adapt(copy.deepcopy(mixed.references[None]))
    plain = Twins(mixed.references[None], FlatModel(family), None, adapters=Adapters())
    base = logits_of(plain, [None] * 3)
    assert torch.equal(logits_of(mixed.twins, [None] * 3), base)
    changed = logits_of(mixed.twins, [None, "large", None])
    torch.testing.assert_close(changed[[0, 2]], base[[0, 2]])
    assert not torch.allclose(changed[1], base[1], atol=0.1)


def test_rows_without_adapter_weights_are_unchanged() -> None:
    base, step = nn.Linear(6, 5), AdapterRuns(num_rows=4)
    layer = AdaptedLinear(
        base, {2: LoraWeights(torch.full((3, 6), torch.nan), torch.ones(5, 3))}, 2, step
    )
    hidden = torch.ones(1, 4, 6)
    assert torch.equal(layer(hidden), base(hidden))
    step.runs = [AdapterRun(adapter=1, start=0, stop=2), AdapterRun(adapter=2, start=2, stop=3)]
    is_touched = layer(hidden).isnan().all(dim=-1)
    assert is_touched.tolist() == [[False, False, True, False]]


def test_an_unknown_adapter_fails_only_its_request(seeing: Mixed) -> None:
    request = replace(make_cases(False)[0].request, adapter="other")
    runner = ModelRunner(seeing.twins.served, 4, 4, adapters=seeing.twins.adapters)
    with pytest.raises(UnknownAdapter, match="large, small") as caught:
        runner.check(request)
    assert caught.value.field == "adapter"
    with pytest.raises(UnknownAdapter, match="none"):
        ModelRunner(seeing.twins.served, 4, 4).check(request)


@given(st.lists(st.tuples(st.sampled_from([None, "x", "y"]), st.integers(1, 4)), min_size=1))
def test_runs_are_the_rows_of_each_adapter(sequences: list[tuple[str | None, int]]) -> None:
    adapters = Adapters(["x", "y"])
    names = [name for name, _ in sequences]
    query_start_loc = [0]
    for _, length in sequences:
        query_start_loc.append(query_start_loc[-1] + length)
    adapters.assign(names, query_start_loc)
    step = adapters.step
    rows: list[int] = [0] * step.num_rows
    for run in step.runs:
        assert run.adapter
        assert not any(rows[run.start : run.stop])
        rows[run.start : run.stop] = [run.adapter] * (run.stop - run.start)
    numbers = {None: 0, "x": 1, "y": 2}
    assert rows == [numbers[name] for name, length in sequences for _ in range(length)]
    neighbours = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert len(step.runs) == sum(name is not None for name in neighbours), "no more than needed"
