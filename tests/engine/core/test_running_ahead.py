"""Steps that are launched before the tokens of the step before them are known.

`FakeRunner` finds awaited tokens only where a device would have them, and verifies all blocks.
"""

import hashlib
import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.errors import InvalidGrammar, InvalidMedia, WorkerFailure
from shared.protocol.requests import EmbeddingParams
from tests.engine.core.test_engine import (
    BLOCK_SIZE,
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    answers_of,
    decode,
    finish_all,
    imaged,
    make_request,
    many,
)
from tests.fakes import FakeLaunched, FakeRunner, ShakyDrafter
from tests.support.engine import make_core
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import (
    Batch,
    EngineRequest,
    RequestOutput,
    SampledToken,
    ScheduledSequence,
    Sequence,
)


class Parity:
    """Mask that allows every other token, depending on all tokens before."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def allowed(self) -> NDArray[np.int32] | None:
        digest = hashlib.sha256(repr(self.token_ids).encode()).digest()
        return np.array([0b01010101 << digest[0] % 2], np.int32)

    def advance(self, token_id: int) -> None:
        self.token_ids.append(token_id)


class Masking(FakeRunner):
    """Runner that applies masks, and fails with the request "bad" in a part of its steps."""

    def __init__(self, part: str = "", **fails: Any) -> None:
        super().__init__(BLOCK_SIZE, VOCAB_SIZE, **fails)
        self._part = part
        self.num_launched_ahead = 0
        self.num_errors = 0

    def launch(self, batch: Batch) -> FakeLaunched:
        self.num_launched_ahead += any(s.sequence.token_ids[-1] < 0 for s in batch.scheduled)
        self.fail("launch", batch.scheduled)
        try:
            super().launch(batch)
        except Exception:
            self.num_errors += 1
            raise
        return MaskingLaunched(self, batch)

    def sample(self, scheduled: list[ScheduledSequence]) -> list[list[SampledToken]]:
        self.fail("sample", scheduled)
        return super().sample(scheduled)

    def next_token(self, sequence: Sequence, appended: Any = ()) -> int:
        assert min(sequence.token_ids) >= 0
        token_id = super().next_token(sequence, appended)
        if sequence.token_mask is None:
            return token_id
        assert isinstance(sequence.token_mask, Parity)
        assert sequence.token_mask.token_ids == sequence.token_ids[sequence.num_prompt_tokens :]
        words = sequence.token_mask.allowed()
        assert words is not None
        return token_id if int(words[0]) >> token_id & 1 else token_id ^ 1

    def fail(self, part: str, scheduled: list[ScheduledSequence]) -> None:
        has_bad = any(s.sequence.request_id == "bad" and s.end > 5 for s in scheduled)
        if part == self._part and has_bad:
            raise ArithmeticError


class MaskingLaunched(FakeLaunched):
    def __init__(self, runner: Masking, batch: Batch) -> None:
        super().__init__(runner, batch)
        self._masking, self._scheduled = runner, batch.scheduled

    def result(self) -> list[list[SampledToken]]:
        self._masking.fail("result", self._scheduled)
        return super().result()


def core_of(
    runner: FakeRunner, num_blocks: int = 64, *, runs_ahead: bool = True, **options: Any
) -> EngineCore:
    return make_core(
        runner,
        BlockPool(num_blocks, BLOCK_SIZE),
        VOCAB_SIZE,
        decode=decode,
        eos=[EOS],
        max_model_len=MAX_MODEL_LEN,
        runs_ahead=runs_ahead,
        **options,
    )


def run_alone(request: EngineRequest) -> list[RequestOutput]:
    core = core_of(Masking(), runs_ahead=False)
    core.add(request)
    return finish_all(core)


@given(
    many,
    st.integers(6, 15),
    st.integers(1, 6),
    st.integers(1, 20),
    st.sampled_from([0, 0, 2, 8]),
    st.data(),
)
def test_outputs_are_those_of_steps_in_turn(
    batch: list[EngineRequest],
    half_blocks: int,
    max_seqs: int,
    budget: int,
    max_drafting_tokens: int,
    data: st.DataObject,
) -> None:
    """With arrivals and cancellations at any time, masks, choices, stops and drafts."""
    runner = Masking()
    rng = random.Random(0)
    core = core_of(
        runner,
        2 * half_blocks,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=budget,
        max_drafting_tokens=max_drafting_tokens,
        new_drafter=lambda: (
            ShakyDrafter(lambda token_ids: None, rng, VOCAB_SIZE) if max_drafting_tokens else None
        ),
    )
    batch = [
        replace(request, new_token_mask=Parity) if data.draw(st.booleans()) else request
        for request in batch
    ]
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
    core._pool.check_integrity()
    assert runner.num_errors == 0
    assert max(runner.batches, default=0) <= budget
    assert runner.is_empty
    for request in batch:
        if request.request_id not in cancelled:
            assert answers_of(outputs, request) == answers_of(run_alone(request), request)


def test_a_step_is_launched_before_the_tokens_before_it_are_known() -> None:
    runner = Masking()
    core = core_of(runner)
    core.add(make_request(max_tokens=6, ignore_eos=True))
    num_tokens = []
    while core.has_work:
        num_tokens.append(sum(len(o.choices[0].token_ids) for o in core.step()))
    # The sixth token ends the answer, so no seventh step is launched.
    assert num_tokens == [1] * 6
    assert runner.batches == [3, 1, 1, 1, 1, 1]
    assert runner.num_launched_ahead == 5


def test_a_row_after_the_end_of_an_answer_is_not_sampled() -> None:
    """Its block is overwritten before another sequence gets it, because nothing verifies it."""
    runner = Masking()
    core = core_of(runner)
    request = make_request(max_tokens=20, stop_token_ids=[*range(1, VOCAB_SIZE)])
    core.add(request)
    outputs = core.step()
    assert outputs[0].usage is not None
    assert runner.batches == [3, 1]
    assert core.has_work
    assert core.step() == []
    other = make_request("other", [4, 5], max_tokens=3, ignore_eos=True)
    core.add(other)
    outputs = finish_all(core)
    assert runner.zeroed
    assert answers_of(outputs, other) == answers_of(run_alone(other), other)


@pytest.mark.parametrize("part", ["launch", "sample", "result"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_ahead_of_known_tokens_fails_its_request_alone(part: str, n: int) -> None:
    runner = Masking(part)
    core = core_of(runner)
    good = make_request("good", [1, 2, 3, 4, 5], n=n, max_tokens=9, ignore_eos=True)
    bad = make_request("bad", max_tokens=9, ignore_eos=True)
    core.add(good)
    core.add(bad)
    outputs = finish_all(core)
    (failed,) = (output for output in outputs if output.error is not None)
    assert failed.request_id == "bad"
    assert isinstance(failed.error, WorkerFailure)
    # The tokens before the failure are returned.
    assert sum(len(d.token_ids) for o in outputs if o.request_id == "bad" for d in o.choices) == 3
    assert answers_of(outputs, good) == answers_of(run_alone(good), good)
    assert runner.num_launched_ahead > 5


def test_a_lost_device_ends_all_steps_in_flight() -> None:
    class Losing(Masking):
        def sample(self, scheduled: list[ScheduledSequence]) -> list[list[SampledToken]]:
            if len(self.batches) == 3:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().sample(scheduled)

    runner = Losing()
    core = core_of(runner)
    core.add(make_request(max_tokens=9, ignore_eos=True))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        finish_all(core)
    assert runner.batches == [3, 1, 1]


def test_a_copy_for_a_choice_is_not_repeated_from_a_block_that_is_free() -> None:
    """The first choice ends while the second one starts with a copy, in a step that fails."""
    good = make_request("good", [1, 2, 3], n=2, max_tokens=4, ignore_eos=True)
    seeds = (
        replace(good, sampling=msgspec.structs.replace(good.sampling, seed=i)) for i in range(9)
    )
    for request in seeds:
        first, second = (token_ids for token_ids, *_ in answers_of(run_alone(request), request))
        if first[1] not in [first[0], *second[:3]]:
            break
    stopped = msgspec.structs.replace(request.sampling, stop_token_ids=[first[1]])
    good = replace(request, sampling=stopped)
    runner = Masking("sample")
    core = core_of(runner)
    core.add(good)
    core.add(make_request("bad", [1, 2, 2, 2], max_tokens=9, ignore_eos=True))
    outputs = finish_all(core)
    assert [output.request_id for output in outputs if output.error is not None] == ["bad"]
    assert answers_of(outputs, good) == answers_of(run_alone(good), good)


def test_a_copy_that_failed_is_made_again() -> None:
    class FailingOnce(Masking):
        has_failed = False

        def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
            if not self.has_failed:
                self.has_failed = True
                raise ArithmeticError
            super().copy_blocks(copies)

    core = core_of(FailingOnce())
    request = make_request("r", [1, 2, 3, 4], n=2, max_tokens=6, ignore_eos=True)
    core.add(request)
    outputs = finish_all(core)
    assert answers_of(outputs, request) == answers_of(run_alone(request), request)


def test_a_request_that_cannot_be_prepared_keeps_no_other_tokens_back() -> None:
    core = core_of(Masking(fails_to_prepare=["bad"]))
    good = make_request("good", max_tokens=6, ignore_eos=True)
    core.add(good)
    outputs = core.step()
    core.add(make_request("bad"))
    outputs += core.step()
    (failed,) = (output for output in outputs if output.error is not None)
    assert isinstance(failed.error, InvalidMedia)
    outputs += finish_all(core)
    good_outputs = [output for output in outputs if output.request_id == "good"]
    assert answers_of(good_outputs, good) == answers_of(run_alone(good), good)


def test_an_invalid_grammar_fails_before_its_step_is_sampled() -> None:
    class Invalid(Parity):
        def allowed(self) -> NDArray[np.int32] | None:
            if len(self.token_ids) == 2:
                raise InvalidGrammar("too complex", field="sampling_params")
            return super().allowed()

    core = core_of(Masking())
    good = make_request("good", max_tokens=8, ignore_eos=True)
    core.add(replace(make_request("bad", max_tokens=8, ignore_eos=True), new_token_mask=Invalid))
    core.add(good)
    outputs = finish_all(core)
    assert [len(o.choices) for o in outputs if o.request_id == "bad"] == [1, 1, 0]
    assert isinstance(
        outputs[-1].error or next(o.error for o in outputs if o.error), InvalidGrammar
    )
    assert answers_of(outputs, good) == answers_of(run_alone(good), good)


def test_embeddings_and_items_of_a_step_ahead_are_those_of_steps_in_turn() -> None:
    embedded = replace(make_request("e", [1, 2, 3, 4, 5, 6]), embedding=EmbeddingParams())
    seeing = imaged("i", max_tokens=6)
    core = core_of(Masking(), max_num_batched_tokens=4)
    for request in (embedded, seeing):
        core.add(request)
    outputs = finish_all(core)
    (ended,) = (output for output in outputs if output.request_id == "e")
    assert ended.embedding == bytes([1, 2, 3, 4, 5, 6])
    assert answers_of(outputs, seeing) == answers_of(run_alone(seeing), seeing)
