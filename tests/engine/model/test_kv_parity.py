"""Engines that restore the blocks of another answer as if they had computed all of them."""

import copy
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.protocol.sampling import SamplingParams
from tests.engine.cpu.test_native import needs_kernels
from tests.engine.model.test_lora import make_mixed
from tests.engine.model.test_parity import Case, build, make_cases, widen
from tests.support.engine import make_core
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.sequence import EngineRequest, KVRun, ReceivedKV, RequestOutput
from workers.engine.cpu.decoder import NativeModel
from workers.engine.model.flat_model import DecoderModel, FlatModel
from workers.engine.model.lora import Adapters
from workers.engine.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE, NUM_BLOCKS = 8, 64
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, max_tokens=16, ignore_eos=True, seed=11, n=3)


class Engine:
    """An engine with separate memory; models are shared, because they hold no state."""

    def __init__(
        self,
        model: DecoderModel,
        tower: Tower | None,
        adapters: Adapters | None = None,
        max_num_batched_tokens: int = 512,
    ) -> None:
        self.runner = ModelRunner(model, NUM_BLOCKS, BLOCK_SIZE, tower, 0, None, adapters)
        self.core = make_core(
            self.runner,
            BlockPool(NUM_BLOCKS, BLOCK_SIZE),
            model.vocab_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=256,
            kv_memory=self.runner,
        )

    def run(self, request: EngineRequest) -> list[RequestOutput]:
        outputs = []
        self.core.add(request)
        while self.core.has_work:
            outputs += self.core.step()
        assert [output.error for output in outputs if output.error is not None] == []
        return outputs

    def answer(self, request: EngineRequest) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in range(request.sampling.n)]
        for output in self.run(request):
            for delta in output.choices:
                answers[delta.index] += delta.token_ids
        return answers

    def prefill(self, request: EngineRequest) -> list[KVRun]:
        one_token = SamplingParams(temperature=0, max_tokens=1)
        return self.run(replace(request, sampling=one_token, export_run_bytes=1))[-1].kv

    @property
    def num_found(self) -> int:
        return self.core.stats().prefix_hit_tokens


def check_parity(
    model: DecoderModel,
    tower: Tower | None,
    request: EngineRequest,
    adapters: Adapters | None = None,
) -> None:
    """Compare an engine with blocks of another to one that has none, and their blocks."""
    runs = Engine(model, tower, adapters).prefill(request)
    num_blocks = (len(request.prompt_token_ids) - 1) // BLOCK_SIZE
    assert len(runs) == num_blocks > 1
    expected = Engine(model, tower, adapters).answer(request)
    for num_cached in (0, 1):
        engine = Engine(model, tower, adapters)
        if num_cached and not request.items:
            beginning = request.prompt_token_ids[: BLOCK_SIZE + 1]
            engine.run(replace(request, request_id="b", prompt_token_ids=beginning))
        before = engine.num_found
        assert engine.answer(replace(request, received=ReceivedKV(list(runs)))) == expected
        assert engine.num_found - before >= num_blocks * BLOCK_SIZE
        # Byte for byte: what it hands on is what it was given.
        again = engine.prefill(replace(request, request_id="again"))
        assert [run.hashes for run in again] == [run.hashes for run in runs]
        first = num_cached if not request.items else 0
        assert [b"".join(run.data) for run in again[first:]] == [
            b"".join(run.data) for run in runs[first:]
        ]


def make_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    model = build(name).eval().requires_grad_(False)
    widen(model)
    return cast(PreTrainedModel, model.to(dtype))


def cases_of(sees: bool) -> list[Case]:
    """Prompts of several blocks; where the model sees, two of them have images."""
    cases = make_cases(sees)
    return [case for case in cases if len(case.request.prompt_token_ids) > 2 * BLOCK_SIZE]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "qwen2_vl"),
        pytest.param(torch.float64, "llama", marks=pytest.mark.long),
        (torch.float32, "llama"),
        pytest.param(torch.float32, "qwen2_vl", marks=pytest.mark.long),
    ],
)
def test_torch(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    family = adapt(copy.deepcopy(model))
    tower = None if family.tower is None else Tower(family.tower, family.model)
    sampling = [GREEDY, SAMPLED] if dtype == torch.float64 else [GREEDY, replace_n(GREEDY)]
    for case in cases_of(family.tower is not None):
        for params in sampling:
            check_parity(FlatModel(family), tower, replace(case.request, sampling=params))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_prompts_that_are_restored_in_parts_and_others_answer_as_alone(
    sampling: SamplingParams,
) -> None:
    model = FlatModel(adapt(make_model("llama", torch.float64)))
    prompts = [random.Random(seed).choices(range(model.vocab_size), k=120) for seed in range(2)]
    requests = [
        EngineRequest(name, token_ids, [], sampling)
        for name, token_ids in (
            ("running", prompts[0][:20]),
            ("long", prompts[0]),
            ("later", prompts[1][:60]),
        )
    ]
    expected = {request.request_id: Engine(model, None).answer(request) for request in requests}
    running, *received = requests
    # Two blocks are restored before each step.
    engine = Engine(model, None, max_num_batched_tokens=2 * BLOCK_SIZE)
    answers = {name: [list[int]() for _ in range(sampling.n)] for name in expected}
    num_new = list[int]()

    def step() -> None:
        outputs = engine.core.step()
        num_new.append(sum(output.request_id == "running" for output in outputs))
        for output in outputs:
            assert output.error is None
            for delta in output.choices:
                answers[output.request_id][delta.index] += delta.token_ids

    engine.core.add(running)
    while not answers["running"][-1]:
        step()
    num_new.clear()
    for prompt in received:
        runs = Engine(model, None).prefill(prompt)
        engine.core.add(replace(prompt, received=ReceivedKV(runs)))
        step()
    while engine.core.has_work:
        step()
    # Meanwhile, most of the long prompt's fourteen blocks are restored.
    assert num_new[:8] == [1] * 8
    assert answers == expected
    assert engine.num_found >= 112 + 56


@pytest.mark.parametrize("is_lost", [False, True])
def test_blocks_that_the_device_has_no_memory_for_are_computed(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is lost ends the step instead."""
    model = FlatModel(adapt(make_model("llama", torch.float64)))
    request = replace(cases_of(False)[0].request, sampling=GREEDY)
    runs = Engine(model, None).prefill(request)
    expected, engine = Engine(model, None).answer(request), Engine(model, None)
    write, writes = torch.Tensor.index_copy_, itertools.count(1)

    def fail_once(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if next(writes) == 2:
            if is_lost:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            raise torch.OutOfMemoryError("CUDA out of memory")
        return write(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "index_copy_", fail_once)
    if is_lost:
        with pytest.raises(RuntimeError, match="CUDA error"):
            engine.answer(replace(request, received=ReceivedKV(runs)))
        return
    assert engine.answer(replace(request, received=ReceivedKV(runs))) == expected
    assert engine.num_found == 0


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "qwen2_vl"),
        pytest.param(torch.float32, "llama", marks=pytest.mark.long),
        (torch.bfloat16, "llama"),
        pytest.param(torch.bfloat16, "qwen2_vl", marks=pytest.mark.long),
    ],
)
def test_native_kernels(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    whole = adapt(model)
    tower = None if whole.tower is None else Tower(whole.tower, model)
    native = NativeModel(adapt(copy.deepcopy(model)), 1)
    for case in cases_of(whole.tower is not None):
        for params in (GREEDY, replace_n(GREEDY)):
            check_parity(native, tower, replace(case.request, sampling=params))


def replace_n(sampling: SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature, max_tokens=sampling.max_tokens, ignore_eos=True, n=3
    )


@pytest.mark.parametrize("adapter", [None, "small", pytest.param("large", marks=pytest.mark.long)])
def test_adapters(adapter: str | None, tmp_path: Path) -> None:
    twins = make_mixed("llama", tmp_path).twins
    (case, *_) = cases_of(False)
    request = replace(case.request, adapter=adapter, sampling=GREEDY)
    check_parity(twins.served, None, request, twins.adapters)


def test_layouts_of_other_kernels_dtypes_and_block_sizes_differ() -> None:
    layouts = []
    for dtype in (torch.float64, torch.float32):
        model = FlatModel(adapt(make_model("llama", dtype)))
        layouts += [ModelRunner(model, 4, size).layout for size in (4, 8)]
    layouts.append([NativeModel.kv_packing, *layouts[-1][1:]])
    layouts.append(ModelRunner(FlatModel(adapt(make_model("qwen3", torch.float32))), 4, 8).layout)
    assert len({repr(layout) for layout in layouts}) == len(layouts)
