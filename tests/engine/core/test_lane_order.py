"""Everybody's turn comes: a model in which time is counted in steps, and anything may arrive."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.protocol import subjects
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from tests.engine.core.test_step_cost import observe_line
from tests.fakes import FakeRunner, ShakyDrafter
from tests.support.engine import run_batch
from workers.engine.core import batch_lane
from workers.engine.core.batch_lane import DELAY_S, EXPECTED_S, MAX_LEAST_STEPS
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.scheduler import Scheduler
from workers.engine.core.sequence import EngineRequest, Item, Sequence, Status
from workers.engine.core.step_cost import MIN_CHUNK, StepWork

MAX_MODEL_LEN = 16
BLOCK_SIZE = 2
VOCAB_SIZE = 50
SLOWEST_TOKEN = 8
"""Steps for a token of the batch lane: it takes as long as four allowances of the smallest step,
and every second step may have none, because an interactive prompt begins."""


def full_len(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens + sequence.max_tokens


class LaneOrderMachine(RuleBasedStateMachine):
    """Random requests in both lanes, with preemption, shared blocks, copies and drafts.

    Steps cost time, so those with interactive sequences have few tokens of the batch lane.

    The fake runner verifies all blocks before it samples, so each output is what it would be alone.
    """

    @initialize(
        num_blocks=st.integers(8, 20),
        max_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        prefix_caching=st.booleans(),
        drafting=st.integers(0, 14),
        seed=st.integers(0, 99),
        base_s=st.floats(0, 1),
    )
    def begin(
        self,
        num_blocks: int,
        max_seqs: int,
        budget: int,
        prefix_caching: bool,
        drafting: int,
        seed: int,
        base_s: float,
    ) -> None:
        self.runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool, max_seqs, budget, MAX_MODEL_LEN, prefix_caching, drafting
        )
        # Time of a step without tokens. Each token takes another second.
        self.base_s = base_s
        self.rng = random.Random(seed)
        self.max_seqs, self.budget = max_seqs, budget
        self.alive: list[Sequence] = []
        self.num_requests = self.num_steps = 0
        self.first: Sequence | None = None
        self.due = 0

    @rule(
        prompt=st.builds(
            lambda first, length: [first, *range(1, length)], st.integers(0, 1), st.integers(1, 10)
        ),
        max_tokens=st.integers(1, 6),
        n=st.sampled_from([1, 1, 2, 3]),
        lane=st.sampled_from(subjects.LANES),
        item_at=st.integers(0, 8),
    )
    def arrive(self, prompt: list[int], max_tokens: int, n: int, lane: str, item_at: int) -> None:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        placeholder = PlaceholderRange(min(item_at, len(prompt) - 1), 1)
        items = [Item("image", name, placeholder, {})] * (item_at > 0)
        request = EngineRequest(name, prompt, items, SamplingParams(n=n), lane=lane)
        self.runner.prepare(request)
        if items:
            self.runner.encode([(request, [0])])
        for choice in range(n):
            sequence = Sequence(request, choice, 0, list(prompt), max_tokens)
            sequence.drafter = self.drafter_of(sequence)
            self.scheduler.add(sequence)
            self.alive.append(sequence)

    def drafter_of(self, sequence: Sequence) -> ShakyDrafter:
        def foretell(token_ids: list[int]) -> int:
            return self.runner.next_token(sequence, token_ids[sequence.num_tokens :])

        return ShakyDrafter(foretell, self.rng, VOCAB_SIZE)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.alive.remove(sequence)
        self.scheduler.remove(sequence)

    @precondition(lambda self: self.alive)
    @rule(num_steps=st.integers(1, 5))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.alive:
                self.step()

    def step(self) -> None:
        self.crown()
        batch = self.scheduler.schedule()
        self.num_steps += 1
        assert 0 < batch.num_tokens <= self.budget
        if any(s.draft_token_ids for s in batch.scheduled):
            assert batch.num_tokens <= self.scheduler.max_drafting_tokens
        assert self.scheduler.num_running <= self.max_seqs
        self.check_blocks(batch.scheduled)
        if batch.copies:
            self.runner.copy_blocks(batch.copies)
        tokens = run_batch(self.runner, batch)
        for s, sampled in zip(batch.scheduled, tokens, strict=True):
            s.sequence.token_ids += [token.token_id for token in sampled]
        self.scheduler.update_after_step(batch)
        self.scheduler.observe(batch.work(), self.base_s + batch.num_tokens)
        for sequence in self.alive:
            num_held = len(sequence.block_table)
            assert num_held == -(-sequence.num_computed_tokens // BLOCK_SIZE)
        for s in batch.scheduled:
            if s.sequence.num_output_tokens == s.sequence.max_tokens:
                self.alive.remove(s.sequence)
                self.scheduler.remove(s.sequence)

    def crown(self) -> None:
        """The first sequence finishes in time, unless one of higher priority arrives."""
        first = min(self.alive, key=lambda sequence: sequence.priority)
        if first is not self.first:
            running = [s for s in self.alive if s.status is Status.RUNNING and s is not first]
            self.first = first
            # One token of one of them at a time, at the very worst, once it is paid for.
            num_tokens = full_len(first) + sum(map(full_len, running))
            self.due = self.num_steps + SLOWEST_TOKEN * num_tokens
        assert self.num_steps < self.due

    def check_blocks(self, scheduled: list[Any]) -> None:
        tables = [block for sequence in self.alive for block in sequence.block_table]
        assert len(set(tables)) == self.pool.num_blocks - self.pool.num_free
        for block in set(tables):
            assert self.pool.ref_count(block) == tables.count(block)
        self.pool.check_integrity()
        for s in scheduled:
            start, table = s.sequence.num_computed_tokens, s.sequence.block_table
            assert len(table) == -(-(start + s.num_new_tokens) // BLOCK_SIZE)
            written = table[start // BLOCK_SIZE :]
            assert all(self.pool.ref_count(block) == 1 for block in written)
            if s.copy is not None:
                assert s.copy[1] == written[0]

    def teardown(self) -> None:
        if not hasattr(self, "alive"):
            return
        while self.alive:
            self.step()
        assert not self.scheduler.has_work
        assert self.pool.num_free == self.pool.num_blocks


@pytest.mark.parametrize("min_chunk", [1, MIN_CHUNK])
def test_everybody_comes_to_an_end(min_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lane, "MIN_CHUNK", min_chunk)
    run_state_machine_as_test(LaneOrderMachine)


def test_the_interactive_lane_has_priority_for_a_limited_time() -> None:
    """Two of it arrive at each step, where one can be served."""
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), 1, 8, MAX_MODEL_LEN)

    def arrive(lane: str) -> Sequence:
        request = EngineRequest("r", [0], [], SamplingParams(), lane=lane)
        sequence = Sequence(request, 0, 0, [0], 1)
        scheduler.add(sequence)
        return sequence

    batch = arrive("batch")
    num_steps = 0
    while batch.status is not Status.FINISHED:
        arrive("interactive")
        arrive("interactive")
        step = scheduler.schedule()
        (s,) = step.scheduled
        scheduler.remove(s.sequence)
        scheduler.observe(step.work(), 1.0)
        num_steps += 1
    # Only sequences that arrived within its delay were scheduled before it, and a few while its
    # token was not paid for.
    assert 2 * DELAY_S < num_steps <= 2 * DELAY_S + SLOWEST_TOKEN


@pytest.mark.parametrize(("num_tokens", "budget"), [(1, 8), (6, 1)])
def test_a_batch_sequence_gets_the_place_of_an_interactive_one(
    num_tokens: int, budget: int
) -> None:
    """The only place becomes free only in steps in which another interactive sequence begins."""
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), 1, budget, MAX_MODEL_LEN)
    batch = of_lane("r0", "batch", 1, 1)
    scheduler.add(batch)
    num_steps = 0
    while batch.status is not Status.FINISHED:
        while scheduler.num_waiting < 3:
            scheduler.add(of_lane("r1", "interactive", num_tokens, 4))
        step = scheduler.schedule()
        for s in step.scheduled:
            if s.samples:
                s.sequence.token_ids.append(0)
        scheduler.update_after_step(step)
        scheduler.observe(step.work(), 1.0)
        for s in step.scheduled:
            if s.sequence.num_output_tokens == s.sequence.max_tokens:
                scheduler.remove(s.sequence)
        num_steps += 1
        assert num_steps <= 2 * DELAY_S + SLOWEST_TOKEN * MAX_MODEL_LEN


def test_the_last_batch_sequence_is_preempted() -> None:
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), 4, 32, MAX_MODEL_LEN)
    sequences = []
    for first, lane in enumerate(("batch", "batch", "interactive")):
        prompt = [10 + first, *range(3)]
        request = EngineRequest(f"r{first}", prompt, [], SamplingParams(), lane=lane)
        sequences.append(Sequence(request, 0, 0, list(prompt), 9))
        scheduler.add(sequences[-1])
    for num_scheduled in (3, 2):
        batch = scheduler.schedule()
        assert len(batch.scheduled) == num_scheduled
        for s in batch.scheduled:
            if s.samples:
                s.sequence.token_ids.append(0)
        scheduler.update_after_step(batch)
    # The fifth token of each would have needed a ninth block.
    assert [s.status for s in sequences] == [Status.RUNNING, Status.WAITING, Status.RUNNING]
    assert scheduler.num_preemptions == 1


def of_lane(name: str, lane: str, num_tokens: int, max_tokens: int = 9) -> Sequence:
    prompt = [1000 * int(name[1:]) + i for i in range(num_tokens)]
    request = EngineRequest(name, prompt, [], SamplingParams(), lane=lane)
    return Sequence(request, 0, 0, list(prompt), max_tokens)


BASE_S, TOKEN_S = 0.01, 0.001


def run_step(scheduler: Scheduler) -> dict[str, int]:
    """Run a step on a machine with a constant time of a token; return the tokens of requests."""
    batch = scheduler.schedule()
    for s in batch.scheduled:
        if s.samples:
            s.sequence.token_ids.append(0)
    scheduler.update_after_step(batch)
    scheduler.observe(batch.work(), BASE_S + batch.num_tokens * TOKEN_S)
    return {s.sequence.request_id: s.num_new_tokens for s in batch.scheduled}


def measured_scheduler(max_num_seqs: int = 64, slowdown: float = 1.25) -> Scheduler:
    pool = BlockPool(4000, BLOCK_SIZE)
    scheduler = Scheduler(
        pool, max_num_seqs, 256, MAX_MODEL_LEN, False, interactive_slowdown=slowdown
    )
    observe_line(scheduler.step_cost, BASE_S, TOKEN_S, [1, 4, 16, 64])
    return scheduler


def test_steps_with_interactive_sequences_have_few_tokens_of_the_batch_lane() -> None:
    scheduler = measured_scheduler()
    for number in range(40):
        scheduler.add(of_lane(f"b{number}", "batch", 4))
    assert sum(run_step(scheduler).values()) == 160
    scheduler.add(of_lane("i99", "interactive", 4))
    assert run_step(scheduler) == {"i99": 4}, "a first token comes alone"
    for _ in range(20):
        # 11 ms by itself, and a quarter more, sometimes with a token that earlier steps have paid.
        assert [*run_step(scheduler)] in (["i99", "b0", "b1"], ["i99", "b0", "b1", "b2"])


@pytest.mark.parametrize(("slowdown", "num_decodes"), [(1.1, 1), (1.5, 5), (2.0, 11), (9.0, 40)])
def test_a_larger_slowdown_leaves_the_batch_lane_more(slowdown: float, num_decodes: int) -> None:
    scheduler = measured_scheduler(slowdown=slowdown)
    for number in range(40):
        scheduler.add(of_lane(f"b{number}", "batch", 4))
    run_step(scheduler)
    scheduler.add(of_lane("i99", "interactive", 1))
    assert len(run_step(scheduler)) == 1 + num_decodes


def test_steps_of_the_batch_lane_stay_short_for_some_time() -> None:
    scheduler = measured_scheduler()
    scheduler.add(of_lane("i99", "interactive", 16, max_tokens=1))
    run_step(scheduler)
    scheduler.remove(scheduler.running[0])

    def run_prompts() -> int:
        """Offer a step of the batch lane more prompts than it may have."""
        for number in range(64):
            scheduler.add(of_lane(f"b{number}", "batch", 10))
        num_tokens = sum(run_step(scheduler).values())
        for sequence in (*scheduler.running, *scheduler.waiting):
            scheduler.remove(sequence)
        return num_tokens

    assert run_prompts() == MIN_CHUNK
    scheduler._lane.observe(EXPECTED_S - 1)
    assert run_prompts() == MIN_CHUNK
    scheduler._lane.observe(2.0)
    longest_s = MAX_LEAST_STEPS * (BASE_S + 2 * TOKEN_S)
    assert run_prompts() == pytest.approx((longest_s - BASE_S) / TOKEN_S, rel=0.05)


def with_items(name: str, lane: str, *offsets: int) -> Sequence:
    sequence = of_lane(name, lane, 12)
    for offset in offsets:
        item = Item("image", f"{name}-{offset}", PlaceholderRange(offset, 2), {})
        sequence.request.items.append(item)
    return sequence


ITEM_S = 0.02


def with_known_items(slowdown: float = 1.25) -> Scheduler:
    scheduler = measured_scheduler(slowdown=slowdown)
    scheduler.step_cost.observe(StepWork(4, 0, num_item_tokens=2), BASE_S + 4 * TOKEN_S + ITEM_S)
    return scheduler


def test_an_item_of_the_batch_lane_waits_until_interactive_steps_have_paid_for_it() -> None:
    scheduler = with_known_items()
    scheduler.add(of_lane("i99", "interactive", 1))
    scheduler.add(with_items("b0", "batch", 0))
    scheduler.add(of_lane("b1", "batch", 12))
    num_steps = 0
    while (step := run_step(scheduler)) == {"i99": 1}:
        num_steps += 1
    # A later prompt does not use the allowance of 2.75 ms a step meanwhile.
    assert num_steps == pytest.approx((ITEM_S + TOKEN_S) / 0.00275, abs=1)
    assert step["b0"] > 0


def test_a_step_of_the_batch_lane_alone_has_one_item() -> None:
    scheduler = with_known_items()
    scheduler.add(of_lane("i99", "interactive", 4, max_tokens=1))
    run_step(scheduler)
    scheduler.remove(scheduler.running[0])
    scheduler.add(with_items("b0", "batch", 3, 8))
    scheduler.add(with_items("b1", "batch", 0))
    assert run_step(scheduler) == {"b0": 8}
    assert run_step(scheduler) == {"b0": 4}
    assert run_step(scheduler) == {"b0": 1, "b1": 12}


def test_items_that_an_encoder_has_encoded_do_not_wait() -> None:
    scheduler = with_known_items()
    sequence = with_items("b0", "batch", 0)
    sequence.request.items[0] = replace(sequence.request.items[0], embedding=b"")
    scheduler.add(of_lane("i99", "interactive", 1))
    scheduler.add(sequence)
    assert run_step(scheduler) == {"i99": 1, "b0": 2}


@pytest.mark.parametrize("begins", [False, True])
def test_an_item_is_encoded_before_the_items_of_later_sequences(begins: bool) -> None:
    """Others would be started up to their items, and would then come before those that wait."""
    scheduler = with_known_items()
    scheduler.add(of_lane("i99", "interactive", 4, max_tokens=1))
    run_step(scheduler)
    scheduler.remove(scheduler.running[0])
    scheduler.add(with_items("b0", "batch", 0 if begins else 3, 8))
    for number in range(1, 9):
        sequence = of_lane(f"b{number}", "batch", 3)
        sequence.request.items.append(Item("image", "i", PlaceholderRange(2, 2), {}))
        scheduler.add(sequence)
    last = with_items("b99", "batch", 0)
    scheduler.add(last)
    for _ in range(2):
        run_step(scheduler)
    first, *others = (*scheduler.running, *scheduler.waiting)
    assert first.num_output_tokens == 1, "two items, one a step"
    assert not any(sequence.num_output_tokens for sequence in others)
    for _ in range(9):
        assert last.num_computed_tokens == 0
        run_step(scheduler)
    assert last.num_computed_tokens > 0


def test_an_interactive_sequence_that_waits_for_an_item_of_the_batch_lane_gets_it() -> None:
    """Its prefix is being computed, so that it cannot be in the step."""
    scheduler = Scheduler(BlockPool(400, BLOCK_SIZE), 64, 4, MAX_MODEL_LEN)
    scheduler.observe(StepWork(num_decodes=4, num_item_tokens=2), 5.0)
    first, second = with_items("b0", "batch", 6), with_items("b0", "interactive", 6)
    scheduler.add(of_lane("i99", "interactive", 4, max_tokens=1))
    run_step(scheduler)
    scheduler.remove(scheduler.running[0])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    for _ in range(20):
        run_step(scheduler)
    assert second.num_output_tokens > 0


def test_an_interactive_sequence_takes_the_place_of_one_of_the_batch_lane() -> None:
    scheduler = measured_scheduler(max_num_seqs=2)
    for name in ("b0", "b1"):
        scheduler.add(of_lane(name, "batch", 4))
    run_step(scheduler)
    for name in ("i0", "i1", "i2"):
        scheduler.add(of_lane(name, "interactive", 4))
    assert set(run_step(scheduler)) == {"i0", "i1"}
    assert [s.request_id for s in scheduler.waiting] == ["i2", "b0", "b1"]
    assert scheduler.num_preemptions == 2
