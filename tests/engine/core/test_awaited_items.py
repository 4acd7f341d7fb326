"""Items that a tower thread encodes while the core continues, and that become ready at any time."""

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidMedia
from tests.engine.core.test_engine import (
    BLOCK_SIZE,
    LONG,
    VOCAB_SIZE,
    answers_of,
    finish_all,
    gather,
    imaged,
    item,
    make_core,
    make_request,
    many,
    run_alone,
)
from tests.fakes import FakeLaunched, FakeRunner
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import (
    Batch,
    EngineRequest,
    KVRun,
    LoggedChoice,
    ReceivedKV,
    RequestOutput,
    Span,
)


class TowerRunner(FakeRunner):
    """Runner with a tower thread. The test decides when it has encoded an item."""

    def __init__(self, *, has_spans: bool = False) -> None:
        super().__init__(BLOCK_SIZE, VOCAB_SIZE)
        self._has_spans = has_spans
        self.awaited: list[tuple[str, str]] = []
        """Requests and hashes of items, each once."""

    def spans_of(self, request: EngineRequest) -> list[Span]:
        ranges = [item.placeholder for item in request.items if self._has_spans]
        return [(r.offset, r.offset + r.length) for r in ranges]

    def begin_encoding(self, request: EngineRequest, indexes: Collection[int]) -> set[int]:
        names = dict.fromkeys((request.request_id, request.items[i].mm_hash) for i in indexes)
        assert not names.keys() & self.awaited
        self.awaited += names
        return set(indexes)

    def encode(self, requests: Collection[tuple[EngineRequest, Collection[int]]]) -> int:
        for request, indexes in requests:
            for index in indexes:
                name = request.request_id, request.items[index].mm_hash
                assert name not in self.awaited, "encoded in a step, and by the tower as well"
        return super().encode(requests)

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.awaited = [name for name in self.awaited if name[0] != request_id]

    def launch(self, batch: Batch) -> FakeLaunched:
        for s in batch.scheduled:
            assert not any(start < s.end < stop for start, stop in s.sequence.spans)
        return super().launch(batch)

    def deliver(self, core: EngineCore, index: int = 0, error: Exception | None = None) -> None:
        """Let the tower end an item."""
        name = self.awaited.pop(index % len(self.awaited))
        core.take_embedding(*name, error or b"embedding")


def add_copy(core: EngineCore, request: EngineRequest, **changes: Any) -> None:
    """Add a request with separate items, because the core changes them."""
    core.add(replace(request, items=copy.deepcopy(request.items), **changes))


@given(many, st.integers(6, 15), st.integers(1, 6), st.integers(1, 20), st.data())
def test_outputs_are_those_of_items_encoded_in_steps(
    batch: list[EngineRequest], half_blocks: int, max_seqs: int, budget: int, data: st.DataObject
) -> None:
    """With cancellations, new attempts, preemptions, failing items, and steps that run ahead."""
    runner = TowerRunner(has_spans=data.draw(st.booleans()))
    core = make_core(
        runner,
        2 * half_blocks,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=budget,
        runs_ahead=data.draw(st.booleans()),
    )
    outputs: list[RequestOutput] = []
    ended: set[str] = set()

    def act() -> None:
        action = data.draw(st.integers(0, 9))
        if runner.awaited and (action > 7 or not core.has_work):
            index = data.draw(st.integers(0, 5))
            error = InvalidMedia("a poisoned image") if action == 9 else None
            if error is not None:
                ended.add(runner.awaited[index % len(runner.awaited)][0])
            runner.deliver(core, index, error)
        elif action == 0 and core._requests:
            request_id = data.draw(st.sampled_from([*core._requests]))
            core.cancel(request_id)
            ended.add(request_id)
        else:
            outputs.extend(core.step())

    for request in batch:
        add_copy(core, request)
        for _ in range(data.draw(st.integers(0, 4))):
            act()
    while core._requests or core.has_work:
        assert core.has_work or runner.awaited, "nothing is awaited, and nothing can be done"
        act()
    core._pool.check_integrity()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_without_input) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert runner.is_empty
    for request in batch:
        if request.request_id not in ended:
            assert answers_of(outputs, request) == answers_of(run_alone(request), request)


def test_text_before_an_item_is_computed_while_the_item_is_encoded() -> None:
    runner = TowerRunner()
    core = make_core(runner)
    request = imaged("r")
    other = make_request("other", [2, 2], max_tokens=3, ignore_eos=True)
    add_copy(core, request)
    core.add(other)
    outputs = core.step()
    assert runner.batches == [3 + 2]
    assert core.stats().num_without_input == 1
    outputs += core.step()
    outputs += core.step()
    assert outputs[-1].request_id == "other"
    assert outputs[-1].usage is not None
    assert not core.has_work
    assert core.stats().encoded_items == 0
    runner.deliver(core)
    assert core.has_work
    outputs += finish_all(core)
    assert runner.batches[-3:] == [len(LONG) - 3, 1, 1]
    assert answers_of(outputs, request) == answers_of(run_alone(request), request)


def test_an_item_in_a_cached_prefix_is_not_encoded() -> None:
    runner = TowerRunner()
    core = make_core(runner)
    add_copy(core, imaged("first"))
    runner.deliver(core)
    finish_all(core)
    add_copy(core, imaged("second"))
    assert runner.awaited == []
    finish_all(core)
    received = ReceivedKV([KVRun(0, ["hash"] * 4, ())])
    add_copy(core, imaged("third", tenant="other"), received=received)
    assert runner.awaited == [], "its blocks come from a prefill worker"
    finish_all(core)
    assert core.stats().encoded_items == 2, "the blocks did not fit, so a step has encoded it"


def test_an_item_that_fails_ends_its_request_alone() -> None:
    runner = TowerRunner()
    core = make_core(runner)
    good, bad = imaged("good", n=2), imaged("bad", "b", n=2)
    for request in (good, bad):
        add_copy(core, request)
    runner.deliver(core, 1, ArithmeticError())
    runner.deliver(core)
    outputs = finish_all(core)
    (failed,) = (output for output in outputs if output.error is not None)
    assert failed.request_id == "bad"
    assert answers_of(outputs, good) == answers_of(run_alone(good), good)


def test_a_lost_device_of_the_tower_ends_the_core() -> None:
    runner = TowerRunner()
    core = make_core(runner)
    add_copy(core, imaged("r"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.deliver(core, 0, RuntimeError("CUDA error: an illegal memory access was hit"))


def test_a_result_for_an_earlier_attempt_changes_nothing() -> None:
    runner = TowerRunner()
    core = make_core(runner)
    request = imaged("r", max_tokens=6)
    ((expected, *_),) = gather(
        [delta for output in run_alone(request) for delta in output.choices], 1
    )
    add_copy(core, request)
    core.cancel("r")
    core.take_embedding("r", "a", b"embedding")
    add_copy(core, request, logged=[LoggedChoice(expected[:2], False)])
    core.take_embedding("r", "of another request", ArithmeticError())
    assert runner.awaited == [("r", "a")]
    core.step()
    assert not core.has_work
    runner.deliver(core)
    outputs = finish_all(core)
    token_ids = [token for output in outputs for token in output.choices[0].token_ids]
    assert token_ids == expected[2:]


def test_a_request_without_text_before_its_item_waits_in_its_place() -> None:
    """A request that came later waits, and takes no place of it."""
    runner = TowerRunner()
    core = make_core(runner, max_num_seqs=1)
    first = replace(make_request("first", [7, 7, 1]), items=[item("a", 0, 2)])
    add_copy(core, first)
    later = make_request("later", [2, 2], max_tokens=2, ignore_eos=True)
    core.add(later)
    while core.has_work:
        assert core.step() == []
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_without_input) == (1, 1, 1)
    runner.deliver(core)
    outputs = finish_all(core)
    assert [o.request_id for o in outputs if o.usage is not None] == ["first", "later"]
