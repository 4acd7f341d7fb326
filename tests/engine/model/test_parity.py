"""The engine against transformers' own `generate`, token for token, greedy and in float32."""

import copy
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared.codec import envelope
from shared.codec.tensors import from_torch, to_torch
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError, InvalidRequest, UnsupportedContent
from shared.models.families.qwen_vl import QwenTower
from shared.models.language import LanguageAdapter
from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.protocol.multimodal import PlaceholderRange, content_hash
from shared.protocol.sampling import SamplingParams
from tests.support.engine import make_core, run_batch, spell
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.sequence import (
    Batch,
    EngineRequest,
    Item,
    LoggedChoice,
    ScheduledSequence,
    Sequence,
)
from workers.engine.launched_batch import LaunchedBatch
from workers.engine.loader import LoadedModel, load
from workers.engine.model.flat_model import DecoderModel, FlatModel
from workers.engine.model.lora import Adapters
from workers.engine.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

DEMO_MODEL = Path(__file__).parents[3] / "ops" / "demo_model"
IMAGE, VISION_START, VISION_END, VIDEO = 190, 191, 192, 193
NUM_TEXT_IDS = 190
TEXT: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {"depth": 2, "num_heads": 2, "in_channels": 3, "patch_size": 14, "temporal_patch_size": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
PROCESSOR = Qwen2VLImageProcessorPil(
    size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 24}, patch_size=14, merge_size=2
)


@dataclass(frozen=True)
class Twins:
    """One model twice: as transformers runs it, and as the engine does."""

    reference: PreTrainedModel
    served: DecoderModel
    tower: Tower | None
    answers: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of the reference by request id."""
    adapters: Adapters | None = None

    @property
    def sees(self) -> bool:
        return self.served.family.tower is not None


def vision_config(family: str) -> Any:
    special: dict[str, Any] = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    text: dict[str, Any] = {**TEXT, "rope_parameters": MROPE, "use_sliding_window": False}
    if family == "qwen2_vl":
        vision: dict[str, Any] = {**VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text, vision_config=vision, **special)
    vision = {**VISION, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    if family.startswith("qwen3_vl"):
        vision |= {"depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 49}
        text |= {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
        if family == "qwen3_vl":
            return Qwen3VLConfig(text_config=text, vision_config=vision, **special)
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **special)
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)


def build(name: str) -> PreTrainedModel:
    match name:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**TEXT))
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**TEXT))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=24))
        case "qwen2_vl":
            return Qwen2VLForConditionalGeneration(vision_config(name))
        case "qwen3_vl":
            return Qwen3VLForConditionalGeneration(vision_config(name))
        case "qwen3_vl_moe":
            return Qwen3VLMoeForConditionalGeneration(vision_config(name))
        case _:
            return Qwen2_5_VLForConditionalGeneration(vision_config(name))


def widen(model: PreTrainedModel, seed: int = 5) -> None:
    """Random weights large enough for the answers to vary; the usual ones repeat one token."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Experts are stacked.
            num_inputs = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
            spread = 2.0 * num_inputs**-0.5
            parameter.data.normal_(0, spread, generator=generator)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.3, generator=generator)


FAMILIES = ["llama", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
SEEING_FAMILIES = [name for name in FAMILIES if "vl" in name]


@pytest.fixture(scope="session", params=FAMILIES)
def twins(request: pytest.FixtureRequest) -> Twins:
    return make_twins(request.param)


@pytest.fixture(scope="session")
def seeing() -> Twins:
    return make_twins("qwen2_vl")


def make_twins(name: str) -> Twins:
    model = build(name).eval().requires_grad_(False)
    widen(model)
    family = adapt(copy.deepcopy(model))
    tower = None if family.tower is None else Tower(family.tower, family.model)
    return Twins(model, FlatModel(family), tower)


# -- prompts with images --------------------------------------------------------------------------


def draw_image(seed: int, width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixel_table() -> Tensor:
    """The processor's own arithmetic on each of the 256 values of each channel."""
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 256, 256)).copy()
    table = PROCESSOR.normalize(
        PROCESSOR.rescale(values, PROCESSOR.rescale_factor),
        PROCESSOR.image_mean,
        PROCESSOR.image_std,
    )
    return torch.from_numpy(np.ascontiguousarray(table[:, 0], dtype=np.float32))


def item_of(
    image: Image.Image, offset: int, processor: Qwen2VLImageProcessorPil = PROCESSOR
) -> Item:
    raw = processor(image, do_rescale=False, do_normalize=False, return_tensors="pt")
    patches = raw["pixel_values"].view(-1, 3, 2, 14 * 14)
    grid = raw["image_grid_thw"][0]
    fields = {
        "pixel_patches": patches[:, :, 0].to(torch.uint8),
        "pixel_table": pixel_table(),
        "image_grid_thw": grid,
    }
    mm_hash = content_hash(image.tobytes(), list(image.size))
    return Item("image", mm_hash, PlaceholderRange(offset, int(grid.prod()) // 4), fields)


@dataclass(frozen=True)
class Case:
    request: EngineRequest
    images: list[Image.Image]


MARKS = (VISION_START, IMAGE, VISION_END)


def make_case(
    name: str,
    sizes: Iterable[tuple[int, int]],
    num_words: int,
    max_tokens: int,
    marks: tuple[int, int, int] = MARKS,
) -> Case:
    """Words, then each image followed by words. `marks` are the tokens of an image."""
    rng = np.random.default_rng(sum(name.encode()))

    def words() -> list[int]:
        drawn: list[int] = rng.integers(0, NUM_TEXT_IDS, num_words).tolist()
        return drawn

    token_ids, items, images = words(), [], []
    for i, size in enumerate(sizes):
        images.append(draw_image(int(rng.integers(1000)) + i, *size))
        item = item_of(images[-1], len(token_ids) + 1)
        items.append(item)
        start, image, end = marks
        token_ids += [start, *[image] * item.placeholder.length, end, *words()]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Case(EngineRequest(name, token_ids, items, params), images)


def make_cases(sees: bool) -> list[Case]:
    return [
        make_case("text", [], 23, 20),
        make_case("one", [(90, 60)] if sees else [], 9, 24),
        make_case("two", [(60, 120), (140, 84)] if sees else [], 5, 16),
        make_case("short", [], 1, 30),
    ]


def greedy_answer(model: Any, request: EngineRequest, **inputs: Any) -> list[int]:
    """Return the greedy answer of transformers, as long as the request allows."""
    token_ids = torch.tensor([request.prompt_token_ids])
    answer = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        **inputs,
        do_sample=False,
        min_new_tokens=request.sampling.max_tokens,
        max_new_tokens=request.sampling.max_tokens,
        pad_token_id=0,
    )
    answer_ids: list[int] = answer[0, token_ids.shape[1] :].tolist()
    return answer_ids


def reference_answer(model: Any, case: Case) -> list[int]:
    inputs: dict[str, Any] = {}
    if case.images:
        inputs = dict(PROCESSOR(case.images, return_tensors="pt"))
        token_ids = torch.tensor([case.request.prompt_token_ids])
        inputs["mm_token_type_ids"] = (token_ids == IMAGE).int()
    return greedy_answer(model, case.request, **inputs)


# -- any schedule gives the same tokens -----------------------------------------------------------


@dataclass
class RandomSchedule:
    """Any scheduler at all: each step runs some of the sequences, by some number of tokens each.

    Blocks come from all over the pool; now and then a sequence loses them and starts over.
    """

    rng: random.Random
    num_blocks: int
    block_size: int
    max_chunk: int
    preempt_share: float

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))
        self.num_preemptions = 0

    def next_batch(self, sequences: list[Sequence]) -> Batch:
        scheduled = []
        for sequence in self.rng.sample(sequences, self.rng.randint(1, len(sequences))):
            if self.rng.random() < self.preempt_share and sequence.num_computed_tokens:
                self.drop(sequence)
                self.num_preemptions += 1
            left = sequence.num_uncomputed_tokens
            num_new_tokens = min(left, self.rng.randint(1, self.max_chunk))
            self.grow(sequence, sequence.num_computed_tokens + num_new_tokens)
            scheduled.append(ScheduledSequence(sequence, num_new_tokens, num_new_tokens == left))
        return Batch(scheduled)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.block_table) * self.block_size < num_tokens:
            sequence.block_table.append(self.free.pop(self.rng.randrange(len(self.free))))

    def drop(self, sequence: Sequence) -> None:
        self.free += sequence.block_table
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0


def run_schedule(twins: Twins, cases: list[Case], schedule: RandomSchedule) -> dict[str, list[int]]:
    runner = ModelRunner(
        twins.served,
        schedule.num_blocks,
        schedule.block_size,
        twins.tower,
        adapters=twins.adapters,
        max_num_seqs=len(cases),
    )
    sequences: list[Sequence] = []
    for case in cases:
        runner.prepare(case.request)
        if case.request.items:
            runner.encode([(case.request, range(len(case.request.items)))])
        max_tokens = case.request.sampling.max_tokens
        assert max_tokens is not None
        sequences.append(
            Sequence(case.request, 0, 0, list(case.request.prompt_token_ids), max_tokens)
        )
        sequences[-1].state_slot = len(cases) - len(sequences)
    running = list(sequences)
    while running:
        batch = schedule.next_batch(running)
        for scheduled, tokens in zip(batch.scheduled, run_batch(runner, batch), strict=True):
            sequence = scheduled.sequence
            sequence.num_computed_tokens += scheduled.num_new_tokens
            assert len(tokens) == scheduled.samples
            if not tokens:
                continue
            sequence.token_ids.append(tokens[0].token_id)
            if sequence.num_output_tokens == sequence.max_tokens:
                schedule.drop(sequence)
                running.remove(sequence)
                runner.release(sequence.request_id)
    return {s.request_id: s.token_ids[s.num_prompt_tokens :] for s in sequences}


def answers_of(twins: Twins, cases: list[Case]) -> dict[str, list[int]]:
    """transformers' own; they must vary, or equal answers would prove little."""
    for case in cases:
        request_id = case.request.request_id
        if request_id not in twins.answers:
            twins.answers[request_id] = reference_answer(twins.reference, case)
    answers = {case.request.request_id: twins.answers[case.request.request_id] for case in cases}
    assert all(len(set(answer)) > 5 for answer in answers.values())
    return answers


@pytest.mark.parametrize(
    ("max_chunk", "preempt_share", "block_size"),
    [
        pytest.param(100, 0.0, 16, id="whole prompts", marks=pytest.mark.long),
        pytest.param(7, 0.0, 4, id="chunks of 7", marks=pytest.mark.long),
        pytest.param(13, 0.05, 5, id="chunks of 13, preempted", marks=pytest.mark.long),
        pytest.param(5, 0.1, 1, id="chunks of 5, blocks of 1"),
    ],
)
def test_any_schedule_yields_the_tokens_of_generate(
    twins: Twins, max_chunk: int, preempt_share: float, block_size: int
) -> None:
    cases = make_cases(twins.sees)
    rng = random.Random(max_chunk)
    schedule = RandomSchedule(rng, 256 // block_size, block_size, max_chunk, preempt_share)
    assert run_schedule(twins, cases, schedule) == answers_of(twins, cases)
    assert (schedule.num_preemptions > 0) == (preempt_share > 0)


def test_images_change_the_output(seeing: Twins) -> None:
    """Other images with the same words change the output, also the reference's."""
    case = make_case("seen", [(90, 60)], 9, 12)
    image = draw_image(999, 90, 60)
    offset = case.request.items[0].placeholder.offset
    other = Case(replace(case.request, items=[item_of(image, offset)]), [image])
    schedule = RandomSchedule(random.Random(0), 32, 16, 100, 0.0)
    first, second = (reference_answer(seeing.reference, c) for c in (case, other))
    assert first != second
    assert run_schedule(seeing, [other], schedule) == {"seen": second}


# -- through the real scheduler, pool and preemption ----------------------------------------------


MAX_BUDGET_AHEAD = 64
"""Steps run ahead in cores with fewer tokens."""


class CountingRunner(ModelRunner):
    """Counts the starts of each request: more than one for each choice after a preemption."""

    def __init__(
        self, twins: Twins, num_blocks: int, block_size: int, embedding_cache_bytes: int = 0
    ) -> None:
        super().__init__(
            twins.served,
            num_blocks,
            block_size,
            twins.tower,
            embedding_cache_bytes,
            adapters=twins.adapters,
            max_num_seqs=8,
        )
        self.num_starts: Counter[str] = Counter()
        self.batch_sizes: list[int] = []
        self.num_tokens = 0
        self._reached: dict[tuple[str, int], int] = {}
        self.max_tokens = math.inf
        """Number of tokens above which a step has too little memory."""

    def launch(self, batch: Batch) -> LaunchedBatch:
        self.batch_sizes.append(len(batch.scheduled))
        self.num_tokens += batch.num_tokens
        for s in batch.scheduled:
            key, start = (s.sequence.request_id, s.sequence.choice), s.start
            self.num_starts[s.sequence.request_id] += self._reached.get(key) != start
            self._reached[key] = start + s.num_new_tokens
        launched = super().launch(batch)
        if batch.num_tokens > self.max_tokens:
            raise torch.OutOfMemoryError
        return launched


def run_core(
    twins: Twins,
    cases: list[Case],
    *,
    num_blocks: int,
    budget: int,
    steps_between: int,
    eos_token_ids: frozenset[int] = frozenset(),
    max_model_len: int = 64,
    block_size: int = 4,
    max_tokens: float = math.inf,
) -> tuple[dict[str, list[int]], CountingRunner]:
    runner = CountingRunner(twins, num_blocks, block_size)
    runner.max_tokens = max_tokens
    order = random.Random(budget).sample(range(num_blocks), num_blocks)
    core = make_core(
        runner,
        BlockPool(num_blocks, block_size, order),
        twins.served.vocab_size,
        decode=spell,
        eos=eos_token_ids,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        keeps_states=twins.served.keeps_states,
        # One family has both: in some tests a step is launched before the last tokens are known.
        runs_ahead=budget < MAX_BUDGET_AHEAD and not twins.served.keeps_states,
    )
    waiting = [case.request for case in cases]
    answers: dict[str, list[int]] = {request.request_id: [] for request in waiting}
    step = 0
    while waiting or core.has_work:
        while waiting and step >= steps_between * (len(cases) - len(waiting)):
            core.add(waiting.pop(0))
        for output in core.step():
            assert output.error is None
            for delta in output.choices:
                answers[output.request_id] += delta.token_ids
        step += 1
    assert core.stats().num_free_blocks == num_blocks
    return answers, runner


@pytest.mark.parametrize(
    ("budget", "steps_between"),
    [
        (7, 5),
        (512, 0),
        pytest.param(7, 0, marks=pytest.mark.long),
        pytest.param(13, 0, marks=pytest.mark.long),
        pytest.param(13, 5, marks=pytest.mark.long),
        pytest.param(512, 5, marks=pytest.mark.long),
    ],
)
def test_core_yields_the_tokens_of_generate(twins: Twins, budget: int, steps_between: int) -> None:
    cases = make_cases(twins.sees)
    answers, runner = run_core(
        twins, cases, num_blocks=64, budget=budget, steps_between=steps_between
    )
    assert answers == answers_of(twins, cases)
    assert max(runner.batch_sizes) > 1
    assert set(runner.num_starts.values()) == {1}


def from_afar(case: Case, tower: Tower) -> Case:
    """As the engine has it when an encoder has made the embeddings, which came in an envelope."""
    items = []
    for item in case.request.items:
        (embedding,) = tower.encode([item.fields])
        _, (received,) = envelope.decode(
            envelope.encode(_Nothing(), [from_torch(embedding)]), _Nothing
        )
        metadata = {n: item.fields[n] for n in tower.adapter.metadata if n in item.fields}
        items.append(replace(item, fields=metadata, embedding=to_torch(received)))
    return Case(replace(case.request, items=items), case.images)


class _Nothing(msgspec.Struct):
    """The head of an envelope that holds a tensor."""


@pytest.mark.parametrize("budget", [7, pytest.param(512, marks=pytest.mark.long)])
@pytest.mark.parametrize("twins", SEEING_FAMILIES, indirect=True)
def test_a_remote_tower_yields_the_tokens_of_generate(twins: Twins, budget: int) -> None:
    assert twins.tower is not None
    cases = make_cases(True)
    remote = [from_afar(case, twins.tower) for case in cases]
    answers, _ = run_core(
        replace(twins, tower=None), remote, num_blocks=64, budget=budget, steps_between=2
    )
    assert answers == answers_of(twins, cases)


def test_an_item_without_embeddings_needs_a_tower(seeing: Twins) -> None:
    case = make_case("blind", [(56, 56)], 4, 4)
    runner = ModelRunner(seeing.served, num_blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match="tower"):
        runner.check(case.request)
    assert seeing.tower is not None
    remote = from_afar(case, seeing.tower).request
    runner.prepare(remote)
    runner.encode([(remote, [0])])
    assert runner.encoded_items == 0


@pytest.mark.parametrize("budget", [pytest.param(7, marks=pytest.mark.long), 64])
def test_preempted_requests_yield_the_tokens_of_generate(twins: Twins, budget: int) -> None:
    cases = make_cases(twins.sees)
    answers, runner = run_core(twins, cases, num_blocks=17, budget=budget, steps_between=0)
    assert answers == answers_of(twins, cases)
    assert max(runner.num_starts.values()) > 1


def test_steps_without_memory_yield_the_tokens_of_generate(seeing: Twins) -> None:
    """Steps with more than five tokens fail after they have written keys and values."""
    cases = make_cases(True)
    answers, runner = run_core(
        seeing, cases, num_blocks=64, budget=512, steps_between=0, max_tokens=5
    )
    assert answers == answers_of(seeing, cases)
    assert runner.num_starts.total() > len(cases)


def run_sampled(
    twins: Twins, requests: list[EngineRequest], num_blocks: int, budget: int, seed: int
) -> tuple[dict[tuple[str, int], list[int]], CountingRunner]:
    """Tokens of every choice, from a pool with blocks in an order drawn from `seed`."""
    runner = CountingRunner(twins, num_blocks, 4)
    core = make_core(
        runner,
        BlockPool(num_blocks, 4, random.Random(seed).sample(range(num_blocks), num_blocks)),
        twins.served.vocab_size,
        decode=spell,
        max_num_batched_tokens=budget,
        keeps_states=twins.served.keeps_states,
    )
    answers: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            assert output.error is None
            for delta in output.choices:
                answers.setdefault((output.request_id, delta.index), []).extend(delta.token_ids)
    assert core.stats().num_free_blocks == num_blocks
    return answers, runner


def sampled_requests(rng: random.Random) -> list[EngineRequest]:
    cases = [
        make_case("one", [(90, 60)], 9, 12),
        make_case("two", [(60, 120), (140, 84)], 4, 10),
        make_case("none", [], 12, 14),
    ]
    return [
        replace(
            case.request,
            sampling=SamplingParams(
                n=rng.randint(1, 3),
                temperature=0.7,
                top_p=0.9,
                repetition_penalty=1.2,
                max_tokens=case.request.sampling.max_tokens,
                ignore_eos=True,
            ),
        )
        for case in cases
    ]


def test_sampled_choices_with_images_resume_identically_at_any_token(seeing: Twins) -> None:
    """n > 1, images, chunked prefill, preemption and a resume at any token, all combined."""
    num_recomputed = 0
    for seed in range(8):
        rng = random.Random(seed)
        requests = sampled_requests(rng)
        whole: dict[tuple[str, int], list[int]] = {}
        for request in requests:
            whole |= run_sampled(seeing, [request], 200, 512, seed)[0]
        resumed, left = [], {}
        for request in requests:
            logged = []
            for choice in range(request.sampling.n):
                answer = whole[request.request_id, choice]
                cut = rng.randint(0, len(answer) - 1)
                logged.append(LoggedChoice(answer[:cut], False))
                left[request.request_id, choice] = answer[cut:]
            resumed.append(replace(request, logged=logged))
        got, runner = run_sampled(seeing, resumed, 17, rng.choice([7, 31, 200]), seed)
        assert got == left
        num_recomputed += any(
            runner.num_starts[request.request_id] > request.sampling.n for request in requests
        )
    assert num_recomputed > 0


def test_logits_that_are_not_finite_fail_one_request_and_leave_clean_blocks(seeing: Twins) -> None:
    """The mask alone does not help: 0 times a NaN in a reused block is a NaN."""

    class Spoilt(CountingRunner):
        def launch(self, batch: Batch) -> LaunchedBatch:
            if any(s.sequence.request_id == "bad" for s in batch.scheduled):
                for s in batch.scheduled:
                    if s.sequence.request_id == "bad":
                        for keys, values in self._kv_cache:
                            keys[s.sequence.block_table] = torch.nan
                            values[s.sequence.block_table] = torch.nan
                raise ArithmeticError
            return super().launch(batch)

    good, bad = make_case("good", [], 9, 12), make_case("bad", [], 9, 12)
    runner = Spoilt(seeing, 17, 4)
    core = make_core(runner, BlockPool(17, 4), seeing.served.vocab_size)
    core.add(bad.request)
    core.add(good.request)
    answer: list[int] = []
    failed = []
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                failed.append(output.request_id)
            answer += [token for delta in output.choices for token in delta.token_ids]
    assert failed == ["bad"]
    assert answer == answers_of(seeing, [good])["good"]
    assert all(
        keys.isfinite().all() and values.isfinite().all() for keys, values in runner._kv_cache
    )


# -- the model that the repository carries --------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(ModelConfig(path=str(DEMO_MODEL)), EngineConfig(kernels="torch"))


def ask_demo(demo: LoadedModel, colour: str, question: str) -> Case:
    image = Image.new("RGB", (96, 90), colour)
    processor = Qwen2VLImageProcessorPil.from_pretrained(DEMO_MODEL)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = demo.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    before, after = (demo.tokenizer.encode(part) for part in text.split("<|image_pad|>"))
    item = item_of(image, len(before), processor)
    image_token_id = demo.model.family.model.config.image_token_id
    token_ids = [*before, *[image_token_id] * item.placeholder.length, *after]
    params = SamplingParams(temperature=0, max_tokens=16)
    return Case(EngineRequest(colour, token_ids, [item], params), [image])


def test_the_demo_model_yields_the_tokens_of_transformers(demo: LoadedModel) -> None:
    reference: Any = Qwen2VLForConditionalGeneration.from_pretrained(
        DEMO_MODEL, dtype=torch.float32
    )
    processor = Qwen2VLImageProcessorPil.from_pretrained(DEMO_MODEL)
    cases, expected = [], {}
    for colour in ("red", "blue", "green"):
        case = ask_demo(demo, colour, "What color is this?")
        token_ids = torch.tensor([case.request.prompt_token_ids])
        answer = reference.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            mm_token_type_ids=(token_ids == reference.config.image_token_id).int(),
            **processor(case.images, return_tensors="pt"),
            max_new_tokens=16,
        )[0, token_ids.shape[1] :].tolist()
        expected[colour] = answer
        cases.append(case)
    assert len({tuple(answer) for answer in expected.values()}) > 1
    assert isinstance(demo.model, FlatModel)
    answers, _ = run_core(
        Twins(reference, demo.model, demo.tower),
        cases,
        num_blocks=24,
        budget=7,
        steps_between=2,
        eos_token_ids=demo.eos_token_ids,
    )
    assert answers == expected


# -- restoring and rejecting fields ----------------------------------------------------------------


@pytest.mark.parametrize("size", [(56, 56), (90, 61), (200, 30), (33, 257), (300, 300), (28, 28)])
def test_pixels_come_back_bit_for_bit(seeing: Twins, size: tuple[int, int]) -> None:
    image = draw_image(sum(size), *size)
    vision = seeing.served.family.tower
    assert isinstance(vision, QwenTower)
    expected = PROCESSOR(image, return_tensors="pt")["pixel_values"]
    assert torch.equal(vision.restore(item_of(image, 0).fields), expected)


def spoilt(case: Case, **fields: Any) -> EngineRequest:
    """The request with fields of its first item replaced, or dropped where they are None."""
    item = case.request.items[0]
    changed = {k: v for k, v in {**item.fields, **fields}.items() if v is not None}
    return replace(case.request, items=[replace(item, fields=changed), *case.request.items[1:]])


@pytest.mark.parametrize(
    "fields",
    [
        {"pixel_patches": None},
        {"pixel_patches": torch.zeros(16, 3, 196)},
        {"pixel_patches": torch.zeros(16, 3, 49, dtype=torch.uint8)},
        {"pixel_patches": torch.zeros(16, 3 * 196, dtype=torch.uint8)},
        {"pixel_patches": torch.zeros(20, 3, 196, dtype=torch.uint8)},
        {"pixel_table": torch.zeros(3, 255)},
        {"pixel_table": torch.zeros(3, 256, dtype=torch.float64)},
        {"image_grid_thw": torch.tensor([1, 2**40, 2**40])},
        {"image_grid_thw": torch.tensor([1, -4, -4])},
        {"image_grid_thw": torch.tensor([2, 4, 2])},
        {"image_grid_thw": torch.tensor([1, 16, 1])},
        {"image_grid_thw": torch.tensor([1, 4, 4], dtype=torch.int32)},
        {"image_grid_thw": torch.tensor([[1, 4, 4]])},
    ],
)
def test_malformed_fields_fail_only_their_request(seeing: Twins, fields: dict[str, Any]) -> None:
    case = make_case("spoilt", [(56, 56)], 4, 4)
    runner = ModelRunner(seeing.served, num_blocks=4, block_size=4, tower=seeing.tower)
    runner.check(case.request)
    with pytest.raises(InvalidRequest):
        runner.check(spoilt(case, **fields))


def test_placeholders_must_be_where_the_item_says(seeing: Twins) -> None:
    case = make_case("moved", [(56, 56), (84, 56)], 4, 4)
    runner = ModelRunner(seeing.served, num_blocks=4, block_size=4, tower=seeing.tower)
    first, second = case.request.items
    offset, length = first.placeholder.offset, first.placeholder.length
    for placeholder in (
        PlaceholderRange(offset + 1, length),
        PlaceholderRange(offset, length - 1),
        PlaceholderRange(-5, length),
        PlaceholderRange(10_000, length),
    ):
        moved = [replace(first, placeholder=placeholder), second]
        with pytest.raises(InvalidRequest):
            runner.check(replace(case.request, items=moved))
    with pytest.raises(InvalidRequest, match="overlap"):
        runner.check(replace(case.request, items=[first, first, second]))


def test_a_text_model_rejects_images() -> None:
    family = LanguageAdapter(build("llama"))
    with pytest.raises(UnsupportedContent):
        family.check(make_case("picture", [(56, 56)], 4, 4).request)


# -- the loader -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = build("qwen2")
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(path)
    vocabulary = models.WordLevel({f"w{i}": i for i in range(199)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary)).save_pretrained(path)
    return path


def changed_copy(folder: Path, tmp_path: Path, **config: Any) -> Path:
    copied = tmp_path / "changed"
    shutil.copytree(folder, copied)
    values = json.loads((copied / "config.json").read_text()) | config
    (copied / "config.json").write_text(json.dumps(values))
    return copied


def test_a_loaded_model_has_the_properties_of_its_config(folder: Path) -> None:
    engine = EngineConfig(kv_cache_mib=1, kernels="torch")
    loaded = load(ModelConfig(path=str(folder), max_model_len=100), engine)
    assert loaded.eos_token_ids == {7, 9}
    assert (loaded.max_model_len, loaded.vocab_size) == (100, 199)
    # 3 layers of keys and values, 2 heads of 16 floats, 8 tokens in a block.
    assert loaded.num_blocks == 2**20 // (2 * 3 * 2 * 16 * 4 * 8)
    assert loaded.decode([5, 6]).split("w") == ["", "5", "6"]


def test_configured_dtype_and_blocks_hold(folder: Path) -> None:
    loaded = load(ModelConfig(path=str(folder), dtype="bfloat16"), EngineConfig(num_blocks=128))
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.num_blocks == 128


def test_a_pool_below_one_sequence_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_mib"):
        load(ModelConfig(path=str(folder)), EngineConfig(num_blocks=127))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(folder: Path, tmp_path: Path, name: str) -> None:
    copied = changed_copy(folder, tmp_path)
    (copied / name).unlink()
    with pytest.raises(ConfigError, match=str(copied)):
        load(ModelConfig(path=str(copied)), EngineConfig())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary"),
        ({"num_hidden_layers": 4, "layer_types": None}, "lacks weights"),
        ({"model_type": "bert"}, "no family"),
    ],
)
def test_models_that_would_compute_wrong_tokens_are_rejected(
    folder: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    copied = changed_copy(folder, tmp_path, **config)
    with pytest.raises(ConfigError, match=message):
        load(ModelConfig(path=str(copied)), EngineConfig())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load(ModelConfig(path=str(tmp_path / "nowhere")), EngineConfig())
