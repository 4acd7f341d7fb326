"""Steps for which the device has too little memory: they become smaller, and answers stay equal."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shared.errors import OutOfMemory
from tests.engine.core.test_engine import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    answers_of,
    item,
    make_core,
    make_request,
    run_alone,
)
from tests.fakes import FakeRunner
from workers.engine.core.engine import EngineCore
from workers.engine.core.memory_shortage import HOLD_S, MemoryShortage
from workers.engine.core.sequence import Batch, RequestOutput, ScheduledSequence, Sequence


def finish_all(core: EngineCore) -> list[RequestOutput]:
    """Run all steps, as the step thread does."""
    outputs = []
    while core.has_work:
        outputs += core.step()
        core.observe_time(0.01)
    assert core.stats().num_free_blocks == core.stats().num_blocks
    return outputs


def runner_for(max_tokens: int) -> FakeRunner:
    return FakeRunner(BLOCK_SIZE, VOCAB_SIZE, max_tokens=max_tokens)


def batch_of(*num_tokens: int) -> Batch:
    """Return a batch of sequences with these numbers of new tokens."""
    sequences = [Sequence(make_request(), 0, 0, [1] * count, 8) for count in num_tokens]
    return Batch([ScheduledSequence(s, s.num_tokens, True) for s in sequences])


def test_a_step_is_repeated_before_it_becomes_smaller() -> None:
    """As after an allocator has given back what others have left behind."""
    runner = runner_for(0)
    core = make_core(runner)
    request = make_request(prompt=[1] * 9, max_tokens=1)
    core.add(request)
    assert core.step() == []
    runner.max_tokens = None
    assert answers_of(core.step(), request) == answers_of(run_alone(request), request)
    assert runner.batches == [9, 9]
    assert core.stats().memory_shortages == {"retry": 1, "cut": 0, "preempt": 0, "fail": 0}


def test_prompts_are_computed_in_smaller_chunks_for_a_while() -> None:
    runner = runner_for(5)
    core = make_core(runner)
    core.add(make_request("a", prompt=[1] * 12, max_tokens=1))
    finish_all(core)
    # Twice as a whole, then a half, and then in quarters.
    assert runner.batches == [12, 12, 6, 3, 3, 3, 3]
    core.add(make_request("b", prompt=[2] * 6, max_tokens=1))
    finish_all(core)
    assert runner.batches[7:] == [3, 3]
    core.observe_time(HOLD_S)
    runner.max_tokens = None
    core.add(make_request("c", prompt=[3] * 6, max_tokens=1))
    finish_all(core)
    assert runner.batches[9:] == [6]


def test_sequences_of_low_priority_wait_where_decodes_do_not_fit() -> None:
    runner = runner_for(3)
    core = make_core(runner)
    requests = [make_request(name, [1], max_tokens=6, ignore_eos=True) for name in "abcde"]
    for request in requests:
        core.add(request)
    outputs = finish_all(core)
    for request in requests:
        assert answers_of(outputs, request) == answers_of(run_alone(request), request)
    shortages = core.stats().memory_shortages
    assert shortages["preempt"] == 2
    assert shortages["fail"] == 0
    # The last two were not admitted again while the first three ran.
    assert core.stats().num_preemptions == 2
    assert max(num_tokens for num_tokens in runner.batches[4:]) == 3


def test_only_a_request_that_fails_alone_fails() -> None:
    runner = runner_for(0)
    core = make_core(runner)
    core.add(make_request("a", max_tokens=1))
    core.add(make_request("b", max_tokens=1))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs += core.step()
    (failed,) = outputs
    assert failed.request_id == "a"
    assert isinstance(failed.error, OutOfMemory)
    assert isinstance(failed.error.__cause__, MemoryError)
    runner.max_tokens = None
    (ended,) = finish_all(core)
    assert ended.request_id == "b"
    assert ended.error is None
    assert runner.is_empty


def test_a_sequence_whose_block_was_not_copied_begins_again() -> None:
    class SmallCopies(FakeRunner):
        num_failures = 1

        def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
            if self.num_failures:
                self.num_failures -= 1
                raise MemoryError
            super().copy_blocks(copies)

    core = make_core(SmallCopies(BLOCK_SIZE, VOCAB_SIZE))
    request = make_request(prompt=[1, 2, 3, 4], n=3, max_tokens=2, ignore_eos=True)
    core.add(request)
    outputs = finish_all(core)
    assert answers_of(outputs, request) == answers_of(run_alone(request), request)


def test_an_item_that_does_not_fit_fails_its_request_with_the_reason() -> None:
    class SmallTower(FakeRunner):
        def encode(self, requests: object) -> int:
            raise MemoryError

    core = make_core(SmallTower(BLOCK_SIZE, VOCAB_SIZE))
    core.add(replace(make_request("a"), items=[item("image", 0, 2)]))
    (failed,) = finish_all(core)
    assert isinstance(failed.error, OutOfMemory)


@given(
    st.lists(
        st.tuples(
            st.integers(1, MAX_MODEL_LEN - 8), st.integers(1, 6), st.integers(1, 3), st.booleans()
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 12),
    st.integers(8, 20),
    st.booleans(),
)
def test_answers_are_equal_with_any_amount_of_memory(
    shapes: list[tuple[int, int, int, bool]], max_tokens: int, num_blocks: int, runs_ahead: bool
) -> None:
    """With several choices, whose blocks are copied, with prompts that share prefixes, and with a
    step in flight while the next one is scheduled."""
    requests = [
        make_request(
            f"r{i}",
            [1 + (shared or position) % (VOCAB_SIZE - 1) for position in range(length)],
            max_tokens=num_outputs,
            n=n,
            seed=i,
        )
        for i, (length, num_outputs, n, shared) in enumerate(shapes)
    ]
    core = make_core(
        runner_for(max_tokens), 2 * num_blocks, max_num_batched_tokens=32, runs_ahead=runs_ahead
    )
    for request in requests:
        core.add(request)
    outputs = finish_all(core)
    assert [output.error for output in outputs if output.error is not None] == []
    for request in requests:
        assert answers_of(outputs, request) == answers_of(run_alone(request), request)


def test_limits_end_after_a_while_without_errors() -> None:
    shortage = MemoryShortage()
    batches = [batch_of(9, 8), batch_of(9, 8), batch_of(1, 1)]
    assert [shortage.react(batch) for batch in batches] == ["retry", "cut", "preempt"]
    assert (shortage.limit_prompt_tokens(64), shortage.limit_seqs(64)) == (8, 1)
    shortage.end_step(HOLD_S - 1)
    assert shortage.react(batch_of(1)) == "retry"
    shortage.end_step(HOLD_S - 1)
    assert shortage.is_present
    shortage.end_step(1)
    assert not shortage.is_present
    assert (shortage.limit_prompt_tokens(64), shortage.limit_seqs(64)) == (64, 64)


def test_a_span_that_is_longer_than_the_limit_does_not_stop_the_reaction() -> None:
    """A smaller limit would not divide it."""
    shortage = MemoryShortage()
    reactions = [shortage.react(batch_of(9, 1)) for _ in range(3)]
    assert reactions == ["retry", "cut", "preempt"]
    assert [shortage.react(batch_of(9)) for _ in range(2)] == ["fail", "fail"]
