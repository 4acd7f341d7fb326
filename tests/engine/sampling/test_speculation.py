"""With drafts, right or wrong, every answer is the one that it is without them."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.models.registry import adapt
from shared.models.tower import Tower
from shared.protocol.records import ChoiceDelta
from shared.protocol.sampling import SamplingParams
from shared.telemetry.deltas import samples_of, total
from shared.telemetry.metrics import Metrics
from tests.adapters import ATTENTION, write_adapter
from tests.engine.core import test_engine
from tests.engine.core.test_engine import answers_of, gather, run_alone
from tests.engine.cpu.test_native import needs_kernels
from tests.engine.model.test_parity import build, make_case, widen
from tests.fakes import FakeRunner, ShakyDrafter
from tests.support.engine import make_core, spell
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.ngram_drafter import NgramDrafter
from workers.engine.core.sequence import (
    Drafter,
    EngineRequest,
    LoggedChoice,
    RequestOutput,
    SampledToken,
    ScheduledSequence,
    Sequence,
)
from workers.engine.cpu.decoder import NativeModel
from workers.engine.metrics import EngineMetrics
from workers.engine.model.flat_model import DecoderModel, FlatModel
from workers.engine.model.lora import Adapters, load_adapters
from workers.engine.runner import ModelRunner
from workers.engine.sampling.verifier import draw_batch

pytestmark = pytest.mark.usefixtures("one_thread")

NewDrafter = Callable[[], Drafter | None]


def shaky(answers: list[list[int]], vocab_size: int, seed: int, share: float = 0.7) -> NewDrafter:
    """Knows these answers, each with its prompt before it."""
    rng = random.Random(seed)

    def foretell(token_ids: list[int]) -> int | None:
        num = len(token_ids)
        next_ids = [a[num] for a in answers if len(a) > num and a[:num] == token_ids]
        return rng.choice(next_ids) if next_ids else None

    return lambda: ShakyDrafter(foretell, rng, vocab_size, share)


# -- the core -------------------------------------------------------------------------------------


def drafting_core(
    new_drafter: NewDrafter,
    num_blocks: int = 64,
    budget: int = 64,
    max_drafting_tokens: int = 64,
    runner: FakeRunner | None = None,
) -> EngineCore:
    return make_core(
        runner or FakeRunner(test_engine.BLOCK_SIZE, test_engine.VOCAB_SIZE),
        BlockPool(num_blocks, test_engine.BLOCK_SIZE),
        test_engine.VOCAB_SIZE,
        decode=test_engine.decode,
        eos=[test_engine.EOS],
        max_num_batched_tokens=budget,
        max_model_len=test_engine.MAX_MODEL_LEN,
        new_drafter=new_drafter,
        max_drafting_tokens=max_drafting_tokens,
    )


def finish(core: EngineCore) -> list[RequestOutput]:
    outputs = []
    while core.has_work:
        outputs += core.step()
        core._pool.check_integrity()
    assert core.stats().num_free_blocks == core.stats().num_blocks
    return outputs


def whole_answers(request: EngineRequest, outputs: list[RequestOutput]) -> list[list[int]]:
    return [request.prompt_token_ids + ids for ids, *_ in answers_of(outputs, request)]


@given(
    test_engine.many, st.integers(6, 15), st.integers(1, 20), st.integers(0, 8), st.integers(0, 99)
)
def test_drafts_never_change_an_output(
    batch: list[EngineRequest], half_blocks: int, budget: int, max_drafting_tokens: int, seed: int
) -> None:
    """The runner verifies all blocks, including those found in the cache."""
    alone = {request.request_id: run_alone(request) for request in batch}
    answers = [a for r in batch for a in whole_answers(r, alone[r.request_id])]
    core = drafting_core(
        shaky(answers, test_engine.VOCAB_SIZE, seed), 2 * half_blocks, budget, max_drafting_tokens
    )
    for _ in range(2):
        for request in batch:
            core.add(request)
        outputs = finish(core)
        for request in batch:
            expected = answers_of(alone[request.request_id], request)
            assert answers_of(outputs, request) == expected
    stats = core.stats()
    assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_draft_tokens == 0 or max_drafting_tokens > 0
    assert 0 <= stats.kv_waste < 1


@given(test_engine.requests, st.integers(0, 99))
def test_drafting_continues_after_a_resume_at_any_token(request: EngineRequest, seed: int) -> None:
    alone = run_alone(request)
    new_drafter = shaky(whole_answers(request, alone), test_engine.VOCAB_SIZE, seed)
    core = drafting_core(new_drafter)
    core.add(request)
    whole = finish(core)
    n = request.sampling.n
    for k in range(len(whole)):
        before = [d for o in whole[:k] for d in o.choices]
        logged = [LoggedChoice(ids, end is not None) for ids, _, end, _ in gather(before, n)]
        resumed = drafting_core(new_drafter)
        resumed.add(replace(request, logged=logged))
        after = [d for o in finish(resumed) for d in o.choices]
        assert gather(before + after, n) == answers_of(alone, request)


def test_accepted_drafts_save_steps_and_are_cached() -> None:
    request = test_engine.make_request(max_tokens=12, ignore_eos=True)
    alone = run_alone(request)
    (whole,) = whole_answers(request, alone)
    core = drafting_core(shaky([whole], 8, 0, share=1.0))
    core.add(request)
    assert answers_of(finish(core), request) == answers_of(alone, request)
    stats = core.stats()
    assert stats.num_steps < 12
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 12 - stats.num_steps
    # The last of the fifteen tokens was never computed: seven blocks.
    following = test_engine.make_request("following", [*whole, 1, 1], max_tokens=1)
    assert test_engine.cached_tokens(core, following) == 14


def test_a_failing_run_fails_only_its_request_with_drafts() -> None:
    good = [
        test_engine.make_request(name, prompt, max_tokens=12, ignore_eos=True)
        for name, prompt in (("early", [1, 2]), ("late", [3]))
    ]
    answers = [a for request in good for a in whole_answers(request, run_alone(request))]
    runner = FakeRunner(test_engine.BLOCK_SIZE, test_engine.VOCAB_SIZE, fails_to_run=["bad"])
    core = drafting_core(shaky(answers, 8, 2), runner=runner)
    for request in (good[0], good[1]):
        core.add(request)
    outputs = core.step()
    core.add(test_engine.make_request("bad", [4, 5, 6]))
    outputs += core.step()
    assert core.stats().num_draft_tokens > 0
    outputs += finish(core)
    assert [output.request_id for output in outputs if output.error] == ["bad"]
    for request in good:
        assert answers_of(outputs, request) == answers_of(run_alone(request), request)


def test_draft_counts_are_reported() -> None:
    request = test_engine.make_request(max_tokens=12, ignore_eos=True)
    core = drafting_core(shaky(whole_answers(request, run_alone(request)), 8, 1))
    metrics = Metrics("engine", "engine-1", "demo")
    meters = EngineMetrics(metrics, core.stats(), lambda s: 1000 * s)
    core.add(request)
    finish(core)
    stats = core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    meters.on_step([], [], stats, 1.0, 2.0)
    samples = samples_of(metrics.snapshot())
    name = "spec_decode_num_{}_tokens_total"
    assert total(samples, name.format("draft")) == stats.num_draft_tokens
    assert total(samples, name.format("accepted")) == stats.num_accepted_tokens


def test_choices_with_a_mask_have_no_drafter() -> None:
    class Anything:
        def allowed(self) -> None:
            return None

        def advance(self, token_id: int) -> None:
            pass

    core = drafting_core(shaky([], 8, 0))
    request = test_engine.make_request(max_tokens=12, ignore_eos=True)
    core.add(replace(request, new_token_mask=Anything))
    finish(core)
    assert core.stats().num_draft_tokens == 0


# -- the verifier ---------------------------------------------------------------------------------


def rows_for(*best: int) -> Tensor:
    return 9.0 * torch.eye(8)[list(best)]


def drafted(drafts: tuple[int, ...], **params: Any) -> ScheduledSequence:
    request = EngineRequest("r", [1, 2], [], SamplingParams(temperature=0, **params))
    sequence = Sequence(request, 0, 0, [1, 2], 20)
    sequence.num_computed_tokens = 1
    return ScheduledSequence(sequence, 1 + len(drafts), True, draft_token_ids=drafts)


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [((), [3]), ((5,), [3]), ((3,), [3, 4]), ((3, 5, 5), [3, 4]), ((3, 4, 5), [3, 4, 5, 6])],
)
def test_drafts_are_accepted_up_to_the_first_mismatch(
    drafts: tuple[int, ...], expected: list[int]
) -> None:
    others = [drafted(()), drafted((7, 7))]
    logits = torch.cat([rows_for(0), rows_for(3, 4, 5, 6)[: 1 + len(drafts)], rows_for(7, 7, 2)])
    samples = draw_batch(logits, [others[0], drafted(drafts), others[1]]).result()
    assert samples == [
        [SampledToken(0)],
        [SampledToken(token_id) for token_id in expected],
        [SampledToken(7), SampledToken(7), SampledToken(2)],
    ]


def test_each_position_is_processed_with_the_tokens_before_it() -> None:
    """The greatest logit three times over; a penalty lets it through once."""
    logits = rows_for(3, 3, 3) + rows_for(4, 4, 4) / 2
    (tokens,) = draw_batch(logits, [drafted((3, 4), frequency_penalty=2.0)]).result()
    assert [token.token_id for token in tokens] == [3, 3]
    (tokens,) = draw_batch(logits, [drafted((3, 4), presence_penalty=2.0, min_p=0.5)]).result()
    assert [token.token_id for token in tokens] == [3, 3]
    (tokens,) = draw_batch(rows_for(3, 3, 3), [drafted((3, 3), repetition_penalty=2.0)]).result()
    assert [token.token_id for token in tokens] == [3, 3, 3]
    (tokens,) = draw_batch(logits, [drafted((3, 4), frequency_penalty=5.0)]).result()
    assert [token.token_id for token in tokens] == [3, 4, 3]


def test_a_rejected_draft_without_allowed_successor_fails_no_request() -> None:
    s = drafted((5, 5), allowed_token_ids=[5, 6], logit_bias={6: 100.0})
    s.sequence.bad_words = ((5, 5), (5, 6))
    assert draw_batch(rows_for(5, 5, 5), [s]).result() == [[SampledToken(6)]]


def test_logits_of_a_rejected_draft_must_be_finite_too() -> None:
    """They show whether its keys and values are finite, which stay in the cache."""
    logits = rows_for(3, 4, 5)
    logits[2, 1] = torch.nan
    with pytest.raises(ArithmeticError):
        draw_batch(logits, [drafted((6, 6))]).result()


# -- models ---------------------------------------------------------------------------------------


class Engine:
    """A model and a way to run it, with blocks of 8, which the kernels require."""

    def __init__(self, name: str, native: bool, adapter: Path | None = None) -> None:
        model = build(name).eval().requires_grad_(False)
        widen(model)
        family = adapt(copy.deepcopy(model))
        self.tower = None if family.tower is None else Tower(family.tower, model)
        self.adapters: Adapters | None = None
        if adapter is not None:
            folder = write_adapter(adapter, model, ATTENTION, 4, 8, 1)
            self.adapters = load_adapters(family, {"a": str(folder)})
        self.model: DecoderModel = NativeModel(family, 2) if native else FlatModel(family)

    def core(
        self,
        new_drafter: NewDrafter,
        num_blocks: int = 100,
        budget: int = 64,
        *,
        runs_ahead: bool = False,
    ) -> EngineCore:
        return make_core(
            ModelRunner(self.model, num_blocks, 8, self.tower, adapters=self.adapters),
            BlockPool(num_blocks, 8),
            self.model.vocab_size,
            decode=spell,
            eos=[7],
            max_num_batched_tokens=budget,
            encode=lambda text: [int(part) for part in text.split()],
            new_drafter=new_drafter,
            max_drafting_tokens=64,
            runs_ahead=runs_ahead,
        )

    def requests(self) -> list[EngineRequest]:
        imaged = make_case("pictured", [(60, 60)] if self.tower else [], 9, 20).request
        params_by_name: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0},
            "sampled": {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20, "n": 2},
            "penalized": {
                "temperature": 0,
                "repetition_penalty": 1.3,
                "frequency_penalty": 0.5,
                "presence_penalty": 0.5,
            },
            "banned": {"temperature": 0.5, "seed": 4, "bad_words": ["5 6"], "logit_bias": {5: 4.0}},
            "ends": {"temperature": 0, "min_tokens": 6, "stop": ["1"], "logit_bias": {7: 3.0}},
            "repeating": {"temperature": 0, "logit_bias": {9: 60.0}, "logprobs": 2},
        }
        return [
            replace(
                imaged,
                request_id=name,
                sampling=SamplingParams(**{"max_tokens": 20, "prompt_logprobs": 1, **params}),
                adapter="a" if self.adapters and name != "penalized" else None,
            )
            for name, params in params_by_name.items()
        ]


Told = dict[tuple[str, int], tuple[list[int], str, str | None, str | int | None]]


def run(core: EngineCore, requests: list[EngineRequest]) -> tuple[Told, dict[str, list[float]]]:
    """Answers by request and choice; log probabilities by request, where they were requested."""
    outputs: list[RequestOutput] = []
    for request in requests:
        core.add(request)
    while core.has_work:
        outputs += core.step()
    assert all(output.error is None for output in outputs)
    assert core.stats().num_free_blocks == core.stats().num_blocks
    answers: Told = {}
    logprobs: dict[str, list[float]] = {}
    for request in requests:
        before = [ChoiceDelta(i, 0, log.token_ids, "") for i, log in enumerate(request.logged)]
        deltas = [d for o in outputs if o.request_id == request.request_id for d in o.choices]
        for choice, answer in enumerate(gather(before + deltas, request.sampling.n)):
            answers[request.request_id, choice] = answer
        values = [entry.logprob for delta in deltas for entry in delta.logprobs or []]
        logprobs[request.request_id] = values
    return answers, logprobs


def no_drafter() -> None:
    return None


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("llama", False),
        pytest.param("qwen2_vl", False, marks=pytest.mark.long),
        pytest.param("llama", True, marks=[needs_kernels, pytest.mark.long]),
        pytest.param("qwen2_vl", True, marks=needs_kernels),
    ],
)
def test_models_yield_the_same_tokens_with_drafts(name: str, native: bool) -> None:
    """Greedy and sampled, with an image if the model supports it; preempted and resumed."""
    engine = Engine(name, native)
    requests = engine.requests()
    plain, plain_logprobs = run(engine.core(no_drafter), requests)
    answers = [requests[0].prompt_token_ids + ids for ids, *_ in plain.values()]
    core = engine.core(no_drafter, 12, 20, runs_ahead=True)
    ahead, ahead_logprobs = run(core, requests)
    assert ahead == plain
    assert core.stats().num_preemptions > 0
    for request_id, values in ahead_logprobs.items():
        assert values == pytest.approx(plain_logprobs[request_id], abs=1e-4)
    drafters: list[NewDrafter] = [
        shaky(answers, 199, seed=1, share=0.9),
        lambda: NgramDrafter(4, 1, 3),
    ]
    for new_drafter in drafters:
        for num_blocks, budget in ((100, 64), (12, 20)):
            core = engine.core(new_drafter, num_blocks, budget)
            drafted_answers, logprobs = run(core, requests)
            assert drafted_answers == plain
            for request_id, values in logprobs.items():
                assert values == pytest.approx(plain_logprobs[request_id], abs=1e-4)
            assert core.stats().num_accepted_tokens > 0
            assert core.stats().num_draft_tokens > core.stats().num_accepted_tokens
    assert core.stats().num_preemptions > 0
    resumed = [replace(request, logged=cut(request, plain)) for request in requests]
    drafted_answers, _ = run(engine.core(drafters[0]), resumed)
    for key, (token_ids, _, finish_reason, _) in drafted_answers.items():
        assert (token_ids, finish_reason) == (plain[key][0], plain[key][2])


def cut(request: EngineRequest, answers: Told) -> list[LoggedChoice]:
    return [
        LoggedChoice(answers[request.request_id, choice][0][: 3 + choice], False)
        for choice in range(request.sampling.n)
    ]


def test_adapters_yield_the_same_tokens_with_drafts(tmp_path: Path) -> None:
    engine = Engine("llama", False, adapter=tmp_path)
    requests = engine.requests()
    plain, _ = run(engine.core(no_drafter), requests)
    answers = [requests[0].prompt_token_ids + ids for ids, *_ in plain.values()]
    core = engine.core(shaky(answers, 199, seed=2))
    assert run(core, requests)[0] == plain
    assert core.stats().num_accepted_tokens > 0


def test_repeated_text_is_drafted_correctly() -> None:
    engine = Engine("llama", False)
    request = replace(
        engine.requests()[0],
        sampling=SamplingParams(temperature=0, max_tokens=40, logit_bias={9: 60.0}),
    )
    core = engine.core(lambda: NgramDrafter(8, 2, 4))
    run(core, [request])
    stats = core.stats()
    assert stats.num_accepted_tokens >= 30
    assert stats.num_steps <= 10
