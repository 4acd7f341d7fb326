import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ContextTooLong, InvalidMedia, InvalidRequest, RequestError, WorkerFailure
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.records import ChoiceDelta, Usage
from shared.protocol.requests import EmbeddingParams
from shared.protocol.sampling import SamplingParams
from tests.fakes import FakeRunner
from tests.support import engine
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.request_state import Decode
from workers.engine.core.sequence import (
    EngineRequest,
    Item,
    LoggedChoice,
    RequestOutput,
    SampledToken,
    ScheduledSequence,
)

MAX_MODEL_LEN = 24
BLOCK_SIZE = 2
EOS = 0
PIECES = ["", "a", "b", "ab", "ba", "é", "c", "aab"]
VOCAB_SIZE = len(PIECES)


def decode(token_ids: list[int], **_: object) -> str:
    return "".join(PIECES[t] for t in token_ids)


def make_core(
    runner: FakeRunner | None = None,
    num_blocks: int = 64,
    prefix_caching: bool = True,
    decode: Decode = decode,
    **limits: Any,
) -> EngineCore:
    return engine.make_core(
        runner or FakeRunner(BLOCK_SIZE, VOCAB_SIZE),
        BlockPool(num_blocks, BLOCK_SIZE, initial_order=[i ^ 1 for i in range(num_blocks)]),
        VOCAB_SIZE,
        decode=decode,
        eos=[EOS],
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=prefix_caching,
        **limits,
    )


def make_request(
    request_id: str = "r", prompt: list[int] | None = None, **p: object
) -> EngineRequest:
    return EngineRequest(request_id, prompt or [1, 2, 3], [], SamplingParams(**p))  # type: ignore[arg-type]


def finish_all(core: EngineCore) -> list[RequestOutput]:
    outputs = []
    while core.has_work:
        outputs += core.step()
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_running == stats.num_waiting == 0
    return outputs


def run_alone(request: EngineRequest) -> list[RequestOutput]:
    core = make_core()
    core.add(request)
    return finish_all(core)


Answer = tuple[list[int], str, str | None, str | int | None]


def gather(deltas: Iterable[ChoiceDelta], n: int) -> list[Answer]:
    """Each choice's tokens, text and ending; every delta must join on to the one before."""
    answers: list[Answer] = [([], "", None, None)] * n
    for d in deltas:
        token_ids, text, finish_reason, _ = answers[d.index]
        assert d.position == len(token_ids)
        assert finish_reason is None
        answers[d.index] = (token_ids + d.token_ids, text + d.text, d.finish_reason, d.stop_reason)
    return answers


def answers_of(outputs: list[RequestOutput], request: EngineRequest) -> list[Answer]:
    mine = [o for o in outputs if o.request_id == request.request_id]
    answers = gather((d for o in mine for d in o.choices), request.sampling.n)
    assert [o.usage is not None for o in mine] == [False] * (len(mine) - 1) + [True]
    num_tokens = sum(len(token_ids) for token_ids, *_ in answers)
    usage = mine[-1].usage
    assert usage is not None
    assert usage == Usage(len(request.prompt_token_ids), num_tokens, usage.cached_tokens)
    return answers


def item(mm_hash: str, offset: int, length: int) -> Item:
    return Item("image", mm_hash, PlaceholderRange(offset, length), {})


# Few images, tokens and tenants, so that requests share prefixes.
@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[Item]]:
    token_ids = draw(st.lists(st.integers(1, 2), min_size=1, max_size=6))
    items = []
    for mm_hash in draw(st.lists(st.sampled_from("ab"), max_size=2)):
        length = draw(st.integers(1, 3))
        items.append(item(mm_hash, len(token_ids), length))
        token_ids += [7] * length
    return token_ids, items


def build_request(prompt: tuple[list[int], list[Item]], **rest: Any) -> EngineRequest:
    return EngineRequest(prompt_token_ids=prompt[0], items=prompt[1], **rest)


requests = st.builds(
    build_request,
    prompts(),
    request_id=st.uuids().map(str),
    tenant=st.sampled_from(["", "x"]),
    sampling=st.builds(
        SamplingParams,
        n=st.integers(1, 3),
        max_tokens=st.none() | st.integers(1, 12),
        stop=st.lists(st.text("abc", min_size=2, max_size=4), max_size=2),
        stop_token_ids=st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=1),
        ignore_eos=st.booleans(),
    ),
)
many = st.lists(requests, min_size=1, max_size=5, unique_by=lambda r: r.request_id)


def test_a_generated_placeholder_is_no_part_of_an_item() -> None:
    short = EngineRequest("short", [2, 2, 7], [item("a", 2, 1)], SamplingParams(seed=0))
    items = [item("a", 2, 2), item("a", 4, 1)]
    long = EngineRequest("long", [2, 2, 7, 7, 7], items, SamplingParams())
    core = make_core(FakeRunner(BLOCK_SIZE, VOCAB_SIZE), 12, max_num_seqs=1)
    for request in (short, long):
        core.add(request)
    outputs = finish_all(core)
    assert answers_of(outputs, short)[0][0][0] == 7, "a placeholder, after the item"
    assert answers_of(outputs, long) == answers_of(run_alone(long), long)


@given(many, st.integers(6, 15), st.integers(1, 6), st.integers(1, 20), st.data())
def test_other_requests_do_not_change_an_output(
    batch: list[EngineRequest], half_blocks: int, max_seqs: int, budget: int, data: st.DataObject
) -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner, 2 * half_blocks, max_num_seqs=max_seqs, max_num_batched_tokens=budget)
    outputs: list[RequestOutput] = []
    cancelled = set()
    for request in batch:
        core.add(request)
        for _ in range(data.draw(st.integers(0, 4))):
            outputs += core.step()
        if data.draw(st.integers(0, 4)) == 0:
            core.cancel(request.request_id)
            cancelled.add(request.request_id)
    outputs += finish_all(core)
    assert max(runner.batches, default=0) <= budget
    assert runner.is_empty
    for request in batch:
        if request.request_id not in cancelled:
            assert answers_of(outputs, request) == answers_of(run_alone(request), request)


@given(requests)
def test_the_text_ends_with_the_tokens_up_to_the_stop(request: EngineRequest) -> None:
    for token_ids, text, finish_reason, stop_reason in answers_of(run_alone(request), request):
        if isinstance(stop_reason, str):
            assert decode(token_ids).startswith(text + stop_reason)
        elif stop_reason is None and finish_reason == "length":
            assert text == decode(token_ids)
        else:
            assert text == decode(token_ids[:-1])


@given(requests)
def test_a_resume_at_any_token_continues_identically(request: EngineRequest) -> None:
    whole = run_alone(request)
    n = request.sampling.n
    for k in range(len(whole)):
        before = [d for o in whole[:k] for d in o.choices]
        logged = [LoggedChoice(ids, end is not None) for ids, _, end, _ in gather(before, n)]
        resumed = run_alone(replace(request, logged=logged))
        after = [d for o in resumed for d in o.choices]
        assert gather(before + after, n) == answers_of(whole, request)
        assert resumed[-1].usage == whole[-1].usage


def test_a_stop_string_across_the_cut_is_found() -> None:
    whole = run_alone(make_request(prompt=[1], max_tokens=12, ignore_eos=True))
    ((_, text, _, _),) = gather([d for o in whole for d in o.choices], 1)
    for end in range(2, len(text) + 1):
        request = make_request(
            prompt=[1], max_tokens=12, ignore_eos=True, stop=[text[end - 2 : end]]
        )
        answers = answers_of(run_alone(request), request)
        assert answers[0][1] == text[: text.find(request.sampling.stop[0])]
        outputs = run_alone(request)
        for k in range(len(outputs)):
            before = [d for o in outputs[:k] for d in o.choices]
            logged = [LoggedChoice(ids, False) for ids, *_ in gather(before, 1)]
            resumed = run_alone(replace(request, logged=logged))
            after = [d for o in resumed for d in o.choices]
            assert gather(before + after, 1) == answers


@given(requests)
def test_a_log_that_lacks_only_its_final_record_gets_it_at_once(request: EngineRequest) -> None:
    answers = answers_of(run_alone(request), request)
    logged = [LoggedChoice(ids, False) for ids, *_ in answers]
    (output,) = run_alone(replace(request, logged=logged))
    assert [(d.finish_reason, d.stop_reason) for d in output.choices] == [a[2:] for a in answers]
    assert all(d.token_ids == [] for d in output.choices)
    finished = [LoggedChoice(ids, True) for ids, *_ in answers]
    (output,) = run_alone(replace(request, logged=finished))
    assert (output.choices, output.usage is not None) == ([], True)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
def test_a_log_of_another_model_is_not_continued(token_id: int) -> None:
    core = make_core()
    with pytest.raises(WorkerFailure, match=f"0 to {VOCAB_SIZE - 1}"):
        core.add(replace(make_request(), logged=[LoggedChoice([1, token_id], False)]))
    assert not core.has_work


def test_an_answer_has_no_more_tokens_than_the_model_has_positions() -> None:
    def core_of(num_free_positions: int) -> EngineCore:
        runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
        runner.num_free_positions = num_free_positions
        return make_core(runner)

    endless = make_request(max_tokens=None, ignore_eos=True)
    core = core_of(5)
    core.add(endless)
    ((token_ids, _, reason, _),) = answers_of(finish_all(core), endless)
    assert (len(token_ids), reason) == (5, "length")
    # An attempt whose log lacks only the end has the same limit.
    core.add(replace(endless, logged=[LoggedChoice(token_ids, False)]))
    (output,) = finish_all(core)
    assert [(d.token_ids, d.finish_reason) for d in output.choices] == [([], "length")]
    core.add(make_request(max_tokens=5))
    core.cancel("r")
    for too_many in (make_request(max_tokens=6), make_request(min_tokens=6, max_tokens=None)):
        with pytest.raises(RequestError) as caught:
            core.add(too_many)
        assert caught.value.field in ("sampling_params.max_tokens", "sampling_params.min_tokens")
    with pytest.raises(ContextTooLong, match="more than the 0 positions"):
        core_of(0).add(endless)
    core_of(0).add(replace(endless, embedding=EmbeddingParams()))


def test_a_failing_preparation_fails_only_its_request() -> None:
    good, bad = make_request("good", n=2), make_request("bad", n=2)
    core = make_core(FakeRunner(BLOCK_SIZE, VOCAB_SIZE, fails_to_prepare=["bad"]))
    core.add(bad)
    core.add(good)
    outputs = finish_all(core)
    (error,) = [o.error for o in outputs if o.request_id == "bad"]
    assert isinstance(error, InvalidMedia)
    assert answers_of(outputs, good) == answers_of(run_alone(good), good)


def request_with_item(request_id: str, n: int = 1) -> EngineRequest:
    prompt = ([1, 7, 7], [item(request_id, 1, 2)])
    return build_request(prompt, request_id=request_id, sampling=SamplingParams(n=n))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_outputs_do_not_hold_the_items_of_their_request(runs_ahead: bool) -> None:
    """The memory of an item is free when its request has ended, also while an output is read."""
    core = make_core(runs_ahead=runs_ahead)
    request = request_with_item("a")
    item = weakref.ref(request.items[0])
    core.add(request)
    del request
    outputs = []
    while core.has_work:
        outputs += EngineCore.step(core)  # The text of these outputs is made later.
    assert outputs[-1].texts
    assert item() is None


def test_items_of_a_step_are_encoded_in_one_call() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner)
    for request_id in ("one", "two"):
        core.add(request_with_item(request_id, n=2))
    finish_all(core)
    assert runner.encoded == [["one", "two"]]


def test_a_failing_item_fails_only_its_request() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE, fails_to_encode=["bad"])
    core = make_core(runner)
    good = [request_with_item(request_id, n=2) for request_id in ("early", "late")]
    for request in (good[0], request_with_item("bad", n=2), good[1]):
        core.add(request)
    outputs = finish_all(core)
    (error,) = [o.error for o in outputs if o.error is not None]
    assert isinstance(error, InvalidMedia)
    assert runner.encoded == [["early", "bad", "late"], ["early"], ["bad"], ["late"]]
    for request in good:
        assert answers_of(outputs, request) == answers_of(run_alone(request), request)
    assert runner.is_empty


def test_a_failing_run_fails_only_its_request_and_leaves_clean_blocks() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE, fails_to_run=["bad"])
    core = make_core(runner)
    good = [make_request(request_id, n=2) for request_id in ("early", "late")]
    for request in (good[0], make_request("bad", n=2), good[1]):
        core.add(request)
    outputs = finish_all(core)
    (error,) = [o.error for o in outputs if o.error is not None]
    assert isinstance(error, WorkerFailure)
    for request in good:
        assert answers_of(outputs, request) == answers_of(run_alone(request), request)
    assert runner.zeroed
    assert runner.is_empty


def test_unverified_blocks_are_overwritten_before_reuse() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner, max_num_batched_tokens=4)
    core.add(make_request("gone", prompt=[1] * 10))
    core.step()
    held = {0, 1}  # as the pool gives them out
    core.cancel("gone")
    good = make_request("good", prompt=[2] * 3, max_tokens=2)
    core.add(good)
    core.step()
    assert set(runner.zeroed) == held
    # The remaining tokens are verified.
    finish_all(core)
    assert set(runner.zeroed) == held


def test_a_log_that_cannot_be_replayed_leaves_no_state() -> None:
    def fails(token_ids: list[int], **kwargs: object) -> str:
        raise RuntimeError("no text for these")

    core = make_core(decode=fails)
    bad = replace(make_request("bad"), logged=[LoggedChoice([5], False)])
    with pytest.raises(RuntimeError):
        core.add(bad)
    assert not core.has_work
    core.cancel("bad")


def test_a_failing_request_is_found_by_bisection() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE, fails_to_run=["bad"])
    core = make_core(runner, max_num_seqs=16)
    names = [f"good-{i}" for i in range(15)]
    for name in [*names[:9], "bad", *names[9:]]:
        core.add(make_request(name, prompt=[1], max_tokens=1))
    outputs = core.step()
    assert {o.request_id for o in outputs if o.error is not None} == {"bad"}
    assert {o.request_id for o in outputs if o.usage is not None} == set(names)
    # The whole, and two halves at each of four levels.
    assert len(runner.batches) == 1 + 2 * 4


@pytest.mark.parametrize("place", ["prepare", "encode", "run"])
def test_a_lost_device_ends_the_step_and_fails_no_request(place: str) -> None:
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    fails: Any = {f"fails_to_{place}": ["bad"], "failure": lost}
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE, **fails)
    core = make_core(runner)
    for name in ("good", "bad"):
        core.add(replace(make_request(name, prompt=[7, 7]), items=[item(name, 0, 2)]))
    with pytest.raises(RuntimeError) as raised:
        core.step()
    assert raised.value is lost
    # Nothing runs after the first failure: neither halves of the batch nor one request alone.
    assert len(runner.encoded) == (place != "prepare")
    assert len(runner.batches) == (place == "run")
    assert not runner.zeroed


def test_blocks_are_copied_again_where_a_batch_has_failed() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE, fails_to_run=["bad"])
    core = make_core(runner)
    good = make_request("good", prompt=[1, 2, 3, 4], n=3, ignore_eos=True, max_tokens=4)
    core.add(good)
    outputs = core.step()
    core.add(make_request("bad", prompt=[5, 6]))
    outputs += core.step()
    assert len(runner.copied) == 2 * 2, "for the batch, and for what is left of it"
    outputs += finish_all(core)
    assert isinstance(next(o.error for o in outputs if o.request_id == "bad"), WorkerFailure)
    assert answers_of(outputs, good) == answers_of(run_alone(good), good)


def test_the_peak_number_of_blocks_is_reported() -> None:
    request = make_request(prompt=[1] * 5, max_tokens=4, ignore_eos=True, n=2)
    # The last token is never computed: 5 + 4 - 1 tokens in blocks of 2, two of them shared.
    assert run_alone(request)[-1].kv_blocks == 2 + 2 + 2


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (replace(make_request(), prompt_token_ids=[]), InvalidRequest, "messages"),
        (make_request(prompt=[VOCAB_SIZE]), InvalidRequest, "messages"),
        (make_request(prompt=[-1]), InvalidRequest, "messages"),
        (make_request(prompt=[1] * MAX_MODEL_LEN), ContextTooLong, "messages"),
        (make_request(max_tokens=22), ContextTooLong, "sampling_params.max_tokens"),
        (
            make_request(stop_token_ids=[VOCAB_SIZE]),
            InvalidRequest,
            "sampling_params.stop_token_ids",
        ),
    ],
)
def test_requests_that_cannot_run_are_rejected(
    request_: EngineRequest, error: type[RequestError], field: str
) -> None:
    core = make_core()
    with pytest.raises(error) as raised:
        core.add(request_)
    assert raised.value.field == field
    assert not core.has_work


@pytest.mark.parametrize("ranges", [[(2, 2)], [(-1, 1)], [(0, 2), (1, 1)], [(0, 0)]])
def test_placeholders_must_lie_apart_and_in_the_prompt(ranges: list[tuple[int, int]]) -> None:
    items = [Item("image", "hash", PlaceholderRange(*r), {}) for r in ranges]
    with pytest.raises(InvalidRequest, match="placeholder"):
        make_core().add(replace(make_request(), items=items))


def test_a_running_request_is_not_added_twice() -> None:
    core = make_core()
    core.add(make_request())
    with pytest.raises(InvalidRequest, match="already running"):
        core.add(make_request())


# -- the prefix cache -----------------------------------------------------------------------------

LONG = [1, 2, 1, 7, 7, 7, 7, 2, 1]
"""A prompt for an image, which fills half of the second block, the third and half of the fourth."""


def imaged(request_id: str, mm_hash: str = "a", tenant: str = "", **p: object) -> EngineRequest:
    request = make_request(request_id, LONG, **{"max_tokens": 3, "ignore_eos": True, **p})
    return replace(request, items=[item(mm_hash, 3, 4)], tenant=tenant)


def cached_tokens(core: EngineCore, request: EngineRequest) -> int:
    """After it has run to its end."""
    core.add(request)
    usage = finish_all(core)[-1].usage
    assert usage is not None
    return usage.cached_tokens


def test_steps_that_encode_show_the_cost_of_items_and_not_of_tokens() -> None:
    core = make_core()
    step_cost = core._scheduler.step_cost
    core.add(imaged("first"))
    core.step()
    assert core.stats().encoded_items == 1
    core.observe_time(5.0)
    assert not step_cost.is_known
    assert step_cost.item_seconds(4) == 5.0
    core.step()
    core.observe_time(0.5)
    assert step_cost.seconds(1, 0) == 0.5


def test_a_repeated_prompt_and_its_image_are_not_recomputed() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner)
    assert cached_tokens(core, imaged("first")) == 0
    assert sum(runner.batches) == len(LONG) + 2
    assert core.stats().encoded_items == 1
    assert cached_tokens(core, imaged("second")) == 8
    assert sum(runner.batches) == len(LONG) + 2 + 1 + 2
    stats = core.stats()
    assert stats.encoded_items == 1, "no row of the picture had to be computed"
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (2 * len(LONG), 8)


def test_another_image_shares_the_blocks_before_it() -> None:
    core = make_core()
    assert cached_tokens(core, imaged("first", "a")) == 0
    assert cached_tokens(core, imaged("second", "b")) == 2
    assert core.stats().encoded_items == 2


def test_blocks_of_another_tenant_are_not_found() -> None:
    core = make_core()
    figures = [
        (cached_tokens(core, imaged(f"{i}", f"a of {tenant}", tenant)), core.stats())
        for i, tenant in enumerate(["x", "y", "", "x", "y", ""])
    ]
    assert [num_tokens for num_tokens, _ in figures] == [0, 0, 0, 8, 8, 8]
    assert [stats.encoded_items for _, stats in figures] == [1, 2, 3, 3, 3, 3]


def test_without_the_cache_all_is_computed() -> None:
    core = make_core(prefix_caching=False)
    assert [cached_tokens(core, imaged(request_id)) for request_id in "ab"] == [0, 0]
    assert core.stats().encoded_items == 2


def test_choices_share_the_prompt_that_the_first_has_computed() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner)
    request = imaged("r", n=3)
    assert cached_tokens(core, request) == 0
    assert runner.batches[:2] == [len(LONG), 1 + 2], "two choices compute their last token alone"
    assert core.stats().encoded_items == 1
    assert runner.is_empty


def test_an_image_is_encoded_if_a_cached_prefix_ends_within_it() -> None:
    core = make_core()
    shorter = replace(imaged("first", max_tokens=1), prompt_token_ids=LONG[:7])
    assert cached_tokens(core, shorter) == 0
    assert cached_tokens(core, imaged("second")) == 6
    assert core.stats().encoded_items == 2


def test_a_cached_image_is_encoded_if_its_blocks_are_evicted_after_a_preemption() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner, num_blocks=12)
    assert cached_tokens(core, imaged("first")) == 0
    old = make_request("old", [2] * 9, max_tokens=15, ignore_eos=True)
    core.add(old)
    core.step()
    again = imaged("again", max_tokens=15)
    core.add(again)
    outputs = core.step()
    assert core.stats().encoded_items == 1
    outputs += finish_all(core)
    assert core.stats().encoded_items == 2
    assert answers_of(outputs, again) == answers_of(run_alone(again), again)


class RaisesAtTheEnd(FakeRunner):
    """Prompt logprobs, which show that earlier runs have not spoiled the blocks."""

    def sample(self, scheduled: list[ScheduledSequence]) -> list[list[SampledToken]]:
        if any(s.samples and s.sequence.request_id == "bad" for s in scheduled):
            raise ArithmeticError
        return super().sample(scheduled)


@pytest.mark.parametrize("budget", [4, 64])
def test_blocks_of_a_failed_run_are_not_cached(budget: int) -> None:
    core = make_core(RaisesAtTheEnd(BLOCK_SIZE, VOCAB_SIZE), max_num_batched_tokens=budget)
    core.add(imaged("bad", n=2))
    assert [output.error is not None for output in finish_all(core)] == [True]
    assert cached_tokens(core, imaged("good")) == 0


def test_cached_blocks_of_a_failed_run_are_unregistered() -> None:
    core = make_core(RaisesAtTheEnd(BLOCK_SIZE, VOCAB_SIZE))
    assert cached_tokens(core, imaged("first")) == 0
    core.add(imaged("bad"))
    assert [output.error is not None for output in finish_all(core)] == [True]
    assert cached_tokens(core, imaged("second")) == 0
    assert cached_tokens(core, imaged("third")) == 8


def test_a_failure_keeps_the_blocks_shared_with_other_requests() -> None:
    runner = RaisesAtTheEnd(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner)
    good = imaged("good", max_tokens=12)
    core.add(good)
    outputs = core.step()
    core.add(imaged("bad"))
    outputs += finish_all(core)  # The runner verifies the blocks.
    assert runner.zeroed
    assert [output.request_id for output in outputs if output.error] == ["bad"]
    assert answers_of(outputs, good) == answers_of(run_alone(good), good)


def test_the_logged_part_of_a_resumed_output_is_cached() -> None:
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner)
    whole = imaged("r", max_tokens=9)
    core.add(whole)
    answers = answers_of(finish_all(core), whole)
    ((token_ids, *_),) = answers
    num_run = sum(runner.batches)
    core.add(replace(whole, logged=[LoggedChoice(token_ids[:6], False)]))
    outputs = finish_all(core)
    assert [t for o in outputs for d in o.choices for t in d.token_ids] == token_ids[6:]
    # 15 tokens are known, 14 of them in full blocks; then there is one for each that follows.
    assert sum(runner.batches) - num_run == 1 + 2
    assert outputs[-1].usage == Usage(len(LONG), 9, cached_tokens=len(LONG))


def test_an_embedding_ends_with_its_prompt_and_fails_alone() -> None:
    """In chunks, in one batch with an answer and with a request that fails its batch."""
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE, fails_to_run=["bad"])
    core = make_core(runner, max_num_batched_tokens=4)
    embedded = replace(make_request("e", [1, 2, 3, 4, 5, 6]), embedding=EmbeddingParams())
    core.add(embedded)
    core.add(replace(make_request("bad"), embedding=EmbeddingParams()))
    core.add(make_request("t", [3, 2, 1], max_tokens=3))
    outputs = finish_all(core)
    (ended,) = (o for o in outputs if o.request_id == "e")
    assert ended == RequestOutput(
        "e", [], usage=Usage(6, 0), kv_blocks=3, embedding=bytes([1, 2, 3, 4, 5, 6])
    )
    (failed,) = (o for o in outputs if o.request_id == "bad")
    assert isinstance(failed.error, WorkerFailure)
    answers_of(outputs, make_request("t", [3, 2, 1]))
