"""Models of several ranks against the same model in one rank, token for token in float64."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3VLMoeForConditionalGeneration

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.protocol.sampling import SamplingParams
from shared.stage.ranks import check_rank_settings
from shared.vision.rank_plan import Share, check_heads
from shared.vision.weights import load_weights
from tests.engine.model import test_parity
from tests.engine.model.test_parity import RandomSchedule, Twins, make_case, run_schedule, widen
from tests.engine.parallel.rig import sharded
from tests.models import test_generic
from tests.support.engine import make_core, spell
from workers.cli.models.reports import Report
from workers.cli.models.stage_weights import count_rank_weights
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.ngram_drafter import NgramDrafter
from workers.engine.core.sequence import EngineRequest, LoggedChoice
from workers.engine.cuda.profiling import ClaimedMemory
from workers.engine.loader import LoadedModel, count_block_bytes
from workers.engine.main import size_cache
from workers.engine.model.flat_model import BatchLayout, DecoderModel, FlatModel, StepInputs
from workers.engine.model.lora import Adapters
from workers.engine.model.ranks import check_ranks
from workers.engine.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

SEEING = ("qwen2_vl", "qwen3_vl_moe")
# Biases, norms of heads, soft caps with windows, experts that are stored one by one, a tower, and
# experts that are stored together, with deepstack features.
FAMILIES = ["starcoder2", "qwen3", "gemma2", "qwen3_moe", *SEEING]


def build(name: str, **changes: Any) -> PreTrainedModel:
    if name not in SEEING:
        changes = test_generic.SPECS.get(name, {}) | changes
        return test_generic.build(name, **changes)
    model: PreTrainedModel = test_parity.build(name).eval().requires_grad_(False)
    model.set_experts_implementation("eager")
    widen(model)
    doubled: PreTrainedModel = model.double()
    return doubled


@contextmanager
def twins_of(model: PreTrainedModel, folder: Path, num_ranks: int) -> Iterator[tuple[Twins, Twins]]:
    """Return the model in one rank, and in several ones."""
    family = adapt(copy.deepcopy(model))
    adapter = family.tower
    tower = None if adapter is None else Tower(adapter, family.model)
    without = () if adapter is None else adapter.modules
    with sharded(model, folder, num_ranks, without) as (parts, _):
        if adapter is None:
            family = adapt(load_weights(type(model), folder, model.dtype, "cpu"))
        yield Twins(model, FlatModel(family), tower), Twins(model, parts, tower)


def check_equal(whole: Twins, parts: Twins) -> None:
    cases = [
        make_case("text", [], 23, 10),
        make_case("one", [(90, 60)] if whole.sees else [], 5, 10),
        make_case("short", [], 1, 12),
    ]
    expected = run_schedule(whole, cases, RandomSchedule(random.Random(0), 32, 16, 100, 0.0))
    assert all(len(set(answer)) > 4 for answer in expected.values())
    schedule = RandomSchedule(random.Random(2), 128, 2, 7, 0.1)
    assert run_schedule(parts, cases, schedule) == expected
    assert schedule.num_preemptions > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_any_schedule_yields_the_tokens_of_one_rank(name: str, tmp_path: Path) -> None:
    with twins_of(build(name), tmp_path, 2) as (whole, parts):
        check_equal(whole, parts)


def test_heads_of_keys_and_values_are_repeated(tmp_path: Path) -> None:
    with twins_of(build("llama", num_key_value_heads=2), tmp_path, 4) as (whole, parts):
        check_equal(whole, parts)
        ((keys, _), *_) = parts.served.new_cache(3, 2)
        assert keys.shape == (3, 2, 1, 16)


@pytest.mark.long
@pytest.mark.parametrize("name", test_generic.SPECS)
def test_a_generic_type_is_equal_or_refused(name: str, tmp_path: Path) -> None:
    model = build(name)
    try:
        check_ranks(model.config, tmp_path, 2)
    except ConfigError:
        return
    with twins_of(model, tmp_path, 2) as (whole, parts):
        case = make_case("text", [], 23, 12)
        schedule = RandomSchedule(random.Random(0), 16, 4, 7, 0.1)
        assert run_schedule(parts, [case], schedule) == run_schedule(whole, [case], schedule)


def test_experts_that_are_stored_in_the_other_order_are_turned(tmp_path: Path) -> None:
    config = test_parity.vision_config("qwen3_vl_moe")
    # The part of a matrix is square, so its shape says nothing about the order.
    config.text_config.moe_intermediate_size = 2 * config.text_config.hidden_size
    model = Qwen3VLMoeForConditionalGeneration(config)
    model.save_pretrained(tmp_path)

    def load() -> dict[str, Tensor]:
        without, share = ["model.visual"], Share(1, 4)
        weights = load_weights(type(model), tmp_path, model.dtype, "cpu", without, share=share)
        return weights.state_dict()

    expected = load()
    file = tmp_path / "model.safetensors"
    turned = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(turned, file, {"format": "pt"})
    torch.testing.assert_close(load(), expected, rtol=0, atol=0)


@torch.inference_mode()
def read_changed_blocks(model: DecoderModel) -> Tensor:
    """Return the logits of a token after a block that was zeroed and a block that was copied."""
    cache = model.new_cache(4, 4)

    def forward(table: list[int], num_tokens: int, seq_len: int) -> Tensor:
        layout = BatchLayout([table], [0, num_tokens], [seq_len])
        positions = torch.arange(seq_len - num_tokens, seq_len)
        embeddings = model.embed(positions + 7)
        plan, last = model.plan(layout, cache), torch.tensor([num_tokens - 1])
        return model.forward(StepInputs(embeddings, positions[None], plan, cache, last))

    forward([0, 1], 8, 8)
    model.copy_blocks(cache, [(1, 2)])
    model.zero_blocks(cache, [0])
    return forward([0, 2, 3], 1, 9)


def test_blocks_are_copied_and_zeroed_in_all_ranks(tmp_path: Path) -> None:
    with twins_of(build("llama"), tmp_path, 2) as (whole, parts):
        logits = read_changed_blocks(parts.served)
        torch.testing.assert_close(logits, read_changed_blocks(whole.served))


MIB = 2**20


class RecordedMemory:
    """Readings of a device, in the order in which a rank takes them."""

    def __init__(self, peak: int) -> None:
        self._allocated = [600 * MIB, 640 * MIB]
        self._peak = peak

    def free(self) -> int:
        return 900 * MIB

    def allocated(self) -> int:
        return self._allocated.pop(0)

    def peak(self) -> int:
        return self._peak


@pytest.mark.parametrize("peaks", [(740, 700), (700, 740)])
def test_the_cache_fits_into_the_fullest_rank(peaks: tuple[int, int], tmp_path: Path) -> None:
    own, other = (RecordedMemory(peak * MIB) for peak in peaks)
    with sharded(build("llama"), tmp_path, 2, memory=other) as (parts, ranks):
        loaded = LoadedModel(
            parts,
            None,
            None,
            frozenset(),
            64,
            parts.vocab_size,
            0,
            4,
            Adapters(),
            rank_memories=[ClaimedMemory(rank, 800 * MIB) for rank in ranks],
        )
        engine = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32)
        sized = size_cache(loaded, engine, ClaimedMemory(own, 800 * MIB))
        cache_bytes = sized.num_blocks * count_block_bytes(parts, 4)
    # The limit less the peak of the fullest rank.
    assert cache_bytes == pytest.approx(60 * MIB, rel=0.01)


class EvenTokens:
    """A grammar of even token ids."""

    def __init__(self, vocab_size: int) -> None:
        self._mask = np.full(-(-vocab_size // 32), 0x55555555, dtype=np.int32)

    def allowed(self) -> NDArray[np.int32] | None:
        return self._mask

    def advance(self, token_id: int) -> None:
        pass


def answer(
    model: DecoderModel, requests: list[EngineRequest], *, runs_ahead: bool = False
) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each choice, from a core with few blocks, drafts and a prefix cache."""
    runner = ModelRunner(model, 24, 4, max_num_seqs=8)
    core = make_core(
        runner,
        BlockPool(24, 4),
        model.vocab_size,
        decode=spell,
        max_num_batched_tokens=11,
        new_drafter=lambda: NgramDrafter(3, 1, 3),
        max_drafting_tokens=16,
        runs_ahead=runs_ahead,
    )
    tokens: dict[tuple[str, int], list[int]] = {}
    waiting = list(requests)
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop(0))
        for output in core.step():
            assert output.error is None
            for delta in output.choices:
                tokens.setdefault((output.request_id, delta.index), []).extend(delta.token_ids)
    stats = core.stats()
    assert stats.num_draft_tokens > 0
    assert stats.prefix_hit_tokens > 0
    return tokens


def test_draws_drafts_grammars_shared_prompts_and_resumes_are_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 190, 13).tolist()

    def request(name: str, **params: Any) -> EngineRequest:
        sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params})
        return EngineRequest(name, prompt, [], sampling)

    with twins_of(build("llama"), tmp_path, 2) as (whole, parts):
        vocab_size = whole.served.vocab_size
        requests = [
            request("drawn", temperature=0.9, seed=5, n=3),
            request("greedy", temperature=0),
            replace(
                request("even", temperature=0.7, seed=2),
                new_token_mask=lambda: EvenTokens(vocab_size),
            ),
        ]
        expected = answer(whole.served, requests)
        assert answer(parts.served, requests) == expected
        assert answer(parts.served, requests, runs_ahead=True) == expected
        assert all(token_id % 2 == 0 for token_id in expected["even", 0])
        logged = [LoggedChoice(expected["drawn", choice][:5], False) for choice in range(3)]
        resumed = answer(parts.served, [replace(requests[0], logged=logged), *requests[1:]])
        assert [resumed["drawn", c] for c in range(3)] == [
            expected["drawn", c][5:] for c in range(3)
        ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("opt", "transformers has no plan that divides models of type 'opt'"),
        ("olmo3", "divides layers.*.self_attn.q_proj by 'colwise_gather_output', which is not"),
        ("gemma4_text", "layers that use the ids of tokens"),
        ("mimo_v2_flash", "layers with different numbers of heads"),
        ("granitemoehybrid", "models with states in recurrent layers"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    config = test_generic.make_config(name, **test_generic.SPECS.get(name, {}))
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: ") as refused:
        check_ranks(config, tmp_path, 2)
    assert reason in refused.value.message


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_weights_are_counted_before_they_are_loaded(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    report = Report(divided=check_ranks(model.config, tmp_path, 2))
    for rank, counted in enumerate(count_rank_weights(tmp_path, report, 2)):
        share = Share(rank, 2)
        part = load_weights(type(model), tmp_path, model.dtype, "cpu", share=share)
        assert counted.num_values == sum(p.numel() for p in part.parameters())


@pytest.mark.parametrize(
    ("model", "engine", "field"),
    [
        (ModelConfig("m", adapters={"a": "b"}), EngineConfig(tensor_parallel=2), "adapters"),
        (ModelConfig("m", quantization="int8"), EngineConfig(tensor_parallel=2), "quantization"),
        (ModelConfig("m", prefill="prefill"), EngineConfig(tensor_parallel=2), "prefill"),
        (ModelConfig("m"), EngineConfig(tensor_parallel=2, kernels="tiles"), "kernels"),
    ],
)
def test_settings_that_ranks_lack_are_refused(
    model: ModelConfig, engine: EngineConfig, field: str
) -> None:
    check_rank_settings(model, EngineConfig(kernels=engine.kernels))
    with pytest.raises(ConfigError, match="not supported with") as refused:
        check_rank_settings(model, engine)
    assert (refused.value.field or "").endswith(f".{field}")


@pytest.mark.parametrize(
    ("num_ranks", "reason"),
    [(3, "3 ranks cannot share 4 attention heads"), (8, "8 ranks cannot share 4 attention heads")],
)
def test_numbers_of_heads_are_checked(num_ranks: int, reason: str) -> None:
    config = test_generic.make_config("llama")
    with pytest.raises(ConfigError, match=reason):
        check_heads(config, num_ranks)
