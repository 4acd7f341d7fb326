"""Outputs with caches equal the outputs of transformers' `generate` and of runs without caches."""

import random
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from shared.protocol.multimodal import content_hash
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import (
    IMAGE,
    MAX_BUDGET_AHEAD,
    NUM_TEXT_IDS,
    VISION_END,
    VISION_START,
    Case,
    CountingRunner,
    Twins,
    draw_image,
    item_of,
    make_twins,
    reference_answer,
)
from tests.support.engine import make_core, spell
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.sequence import EngineRequest, LoggedChoice, RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4
NUM_ANSWERED = 12
SIZES = {"tall": (60, 120), "wide": (90, 60), "wide too": (90, 60)}
IMAGES = {name: draw_image(i, *size) for i, (name, size) in enumerate(SIZES.items())}


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return make_twins(request.param)


def case_of(*parts: str | int, tenant: str = "") -> Case:
    """Names stand for images, numbers for seven words each; equal numbers for equal words."""
    token_ids: list[int] = []
    items, images = [], []
    for part in parts:
        if isinstance(part, int):
            token_ids += random.Random(part).choices(range(NUM_TEXT_IDS), k=7)
            continue
        images.append(IMAGES[part])
        item = item_of(images[-1], len(token_ids) + 1)
        items.append(replace(item, mm_hash=content_hash(tenant, item.mm_hash)))
        token_ids += [VISION_START, *[IMAGE] * item.placeholder.length, VISION_END]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    name = " ".join(map(str, parts))
    return Case(EngineRequest(name, token_ids, items, sampling, tenant=tenant), images)


@dataclass
class Answer:
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    """By choice."""
    cached_tokens: int = -1


class Engine:
    def __init__(
        self,
        twins: Twins,
        *,
        num_blocks: int = 64,
        budget: int = 512,
        prefix_caching: bool = True,
        embedding_cache_bytes: int = 0,
    ) -> None:
        self.runner = CountingRunner(twins, num_blocks, BLOCK_SIZE, embedding_cache_bytes)
        order = random.Random(budget).sample(range(num_blocks), num_blocks)
        self._pool = BlockPool(num_blocks, BLOCK_SIZE, order)
        self._core = make_core(
            self.runner,
            self._pool,
            twins.served.vocab_size,
            decode=spell,
            max_num_batched_tokens=budget,
            prefix_caching=prefix_caching,
            runs_ahead=budget < MAX_BUDGET_AHEAD,
        )

    def run(self, *requests: EngineRequest, steps_between: int = 0) -> dict[str, Answer]:
        answers = {request.request_id: Answer() for request in requests}
        for request in requests:
            self._core.add(request)
            for _ in range(steps_between):
                self._take(self._core.step(), answers)
        while self._core.has_work:
            self._take(self._core.step(), answers)
        self._pool.check_integrity()
        assert self._pool.num_free == self._pool.num_blocks
        return answers

    def _take(self, outputs: list[RequestOutput], answers: dict[str, Answer]) -> None:
        for output in outputs:
            assert output.error is None
            answer = answers[output.request_id]
            for delta in output.choices:
                answer.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            if output.usage is not None:
                answer.cached_tokens = output.usage.cached_tokens


OVERLAPPING = [
    ("wide", 1),
    ("wide", 1, 2),
    ("wide", 2),
    ("wide too", 1),
    (1, "wide", 2),
    (1, "wide", "tall"),
    (1, 2),
]


@pytest.mark.parametrize(
    ("steps_between", "budget"),
    [
        pytest.param(0, 7, id="at once-7"),
        pytest.param(0, 512, id="at once-512", marks=pytest.mark.long),
        pytest.param(3, 7, id="joining-7", marks=pytest.mark.long),
        pytest.param(3, 512, id="joining-512"),
        pytest.param(20, 7, id="in turn-7"),
        pytest.param(20, 512, id="in turn-512", marks=pytest.mark.long),
    ],
)
def test_repeated_and_overlapping_prompts_yield_the_tokens_of_generate(
    twins: Twins, budget: int, steps_between: int
) -> None:
    cases = [case_of(*parts) for parts in OVERLAPPING]
    for case in cases:
        name = case.request.request_id
        if name not in twins.answers:
            twins.answers[name] = reference_answer(twins.reference, case)
    assert len({tuple(answer) for answer in twins.answers.values()}) == len(cases)
    engine = Engine(twins, budget=budget, embedding_cache_bytes=2**20)
    for repeat in range(2):
        answers = engine.run(*(case.request for case in cases), steps_between=steps_between)
        for name, answer in answers.items():
            assert answer.token_ids == {0: twins.answers[name]}
            assert repeat == 0 or answer.cached_tokens > 0
    assert engine.runner.encoded_items == len(IMAGES), "each once, for all prompts that show it"


def test_a_repeated_request_recomputes_no_block_and_no_image(twins: Twins) -> None:
    engine = Engine(twins)
    case = case_of("wide", 1, 2)
    num_prompt_tokens = len(case.request.prompt_token_ids)
    for num_cached in (0, (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE):
        before = engine.runner.num_tokens
        (answer,) = engine.run(case.request).values()
        assert answer.cached_tokens == num_cached
        num_run = engine.runner.num_tokens - before
        assert num_run == num_prompt_tokens - num_cached + NUM_ANSWERED - 1
    assert engine.runner.encoded_items == 1


def test_another_image_of_equal_size_shares_no_later_block(twins: Twins) -> None:
    engine = Engine(twins)
    case, other = case_of(1, "wide", 2), case_of(1, "wide too", 2)
    assert case.request.prompt_token_ids == other.request.prompt_token_ids
    engine.run(case.request)
    (answer,) = engine.run(other.request).values()
    assert answer.cached_tokens == 8, "seven words, and what begins a picture"
    assert answer.token_ids == {0: reference_answer(twins.reference, other)}
    assert engine.runner.encoded_items == 2


def test_blocks_are_found_by_their_own_tenant_only(twins: Twins) -> None:
    engine = Engine(twins, embedding_cache_bytes=2**20)
    figures = []
    for tenant in ("a", "b", "a", "b"):
        (answer,) = engine.run(case_of("wide", 1, tenant=tenant).request).values()
        figures.append((answer.cached_tokens > 0, engine.runner.encoded_items))
    assert figures == [(False, 1), (False, 2), (True, 2), (True, 2)]


def test_an_image_of_several_prompts_is_encoded_once_while_cached(twins: Twins) -> None:
    prompts: list[tuple[str | int, ...]] = [("wide", 1), (2, "wide"), (3, "wide", "wide")]
    for embedding_cache_bytes, encoded_items in ((2**20, 1), (0, 3)):
        engine = Engine(twins, embedding_cache_bytes=embedding_cache_bytes)
        for parts in prompts:
            engine.run(case_of(*parts).request)
        assert engine.runner.encoded_items == encoded_items


def sampled(case: Case, seed: int) -> EngineRequest:
    sampling = SamplingParams(
        n=3, seed=seed, temperature=0.8, top_p=0.9, max_tokens=NUM_ANSWERED, ignore_eos=True
    )
    return replace(case.request, sampling=sampling)


@pytest.mark.parametrize("num_blocks", [64, 18], ids=["with room", "preempted"])
def test_sampled_choices_equal_an_engine_without_caches(twins: Twins, num_blocks: int) -> None:
    requests = [
        sampled(case_of(*parts), seed) for seed, parts in enumerate([("wide", 1), ("wide", 2)])
    ]
    plain = Engine(twins, prefix_caching=False).run(*requests)
    assert all(len({*map(tuple, a.token_ids.values())}) == 3 for a in plain.values())
    engine = Engine(twins, num_blocks=num_blocks, budget=20)
    for _ in range(2):
        answers = engine.run(*requests)
        assert {name: a.token_ids for name, a in answers.items()} == {
            name: a.token_ids for name, a in plain.items()
        }
    num_sequences = sum(request.sampling.n for request in requests)
    num_starts = sum(engine.runner.num_starts.values())
    assert (num_starts > 2 * num_sequences) == (num_blocks < 64)


def test_a_resume_finds_its_prompt_and_its_answer(twins: Twins) -> None:
    request = sampled(case_of("wide", 1), 5)
    engine = Engine(twins)
    (whole,) = engine.run(request).values()
    encoded_items = engine.runner.encoded_items
    cuts = [0, 5, NUM_ANSWERED - 1]
    logged = [LoggedChoice(whole.token_ids[i][:cut], False) for i, cut in enumerate(cuts)]
    (rest,) = engine.run(replace(request, logged=logged)).values()
    assert rest.token_ids == {i: whole.token_ids[i][cut:] for i, cut in enumerate(cuts)}
    assert rest.cached_tokens > 0
    assert engine.runner.encoded_items == encoded_items


def test_choices_copy_the_block_in_which_their_prompt_ends(twins: Twins) -> None:
    case = case_of("wide", 1, 2)
    num_prompt_tokens = len(case.request.prompt_token_ids)
    assert (num_prompt_tokens - 1) % BLOCK_SIZE
    greedy = SamplingParams(n=3, temperature=0.0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    engine = Engine(twins, prefix_caching=False)
    (alone,) = engine.run(
        replace(case.request, sampling=msgspec.structs.replace(greedy, n=1))
    ).values()
    num_tokens = engine.runner.num_tokens
    (answer,) = engine.run(replace(case.request, sampling=greedy)).values()
    assert answer.token_ids == dict.fromkeys(range(3), alone.token_ids[0])
    assert answer.cached_tokens == 0
    # The prompt once, its last token for each of the others, and all answers but their last tokens.
    computed = num_prompt_tokens + 2 + 3 * (NUM_ANSWERED - 1)
    assert engine.runner.num_tokens - num_tokens == computed
