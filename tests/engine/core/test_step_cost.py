"""The time of a step by its tokens, and the limit on prompts in a step with decodes."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.core.test_scheduler import BLOCK_SIZE, advance, make_sequence
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.scheduler import Scheduler
from workers.engine.core.sequence import Sequence
from workers.engine.core.step_cost import (
    BATCH_SHARE,
    BATCH_STEP_S,
    DECAY,
    MIN_CHUNK,
    PrefillLimit,
    StepCost,
    max_batch_tokens,
)

counts = st.integers(1, 4096)
seconds = st.floats(1e-5, 10)


def cost_of(base_s: float, token_s: float, sizes: list[int]) -> StepCost:
    cost = StepCost()
    for size in sizes:
        cost.observe(size, base_s + size * token_s)
    return cost


@given(
    st.floats(0, 1),
    st.floats(1e-5, 1e-2),
    st.lists(counts, min_size=2, max_size=30).filter(lambda sizes: max(sizes) > 2 * min(sizes)),
)
def test_the_line_of_steps_is_found(base_s: float, token_s: float, sizes: list[int]) -> None:
    base, token = cost_of(base_s, token_s, sizes).line()
    for size in (1, 100, 5000):
        assert base + size * token == pytest.approx(base_s + size * token_s, rel=0.01, abs=1e-4)


@given(st.lists(st.tuples(counts, seconds), min_size=1, max_size=60))
def test_any_steps_have_a_line_that_rises(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for size, took_s in steps:
        cost.observe(size, took_s)
    base_s, token_s = cost.line()
    assert base_s >= 0
    assert 0 < token_s < math.inf


def test_a_machine_that_slows_down_is_noticed_within_some_dozens_of_steps() -> None:
    cost = cost_of(0.01, 1e-4, [8, 256] * 50)
    for size in [8, 256] * 50:
        cost.observe(size, 3 * (0.01 + size * 1e-4))
    base_s, token_s = cost.line()
    assert base_s == pytest.approx(0.03, rel=3 * DECAY**100 + 0.01)
    assert token_s == pytest.approx(3e-4, rel=3 * DECAY**100 + 0.01)


@given(
    st.floats(0, 0.05),
    st.floats(1e-5, 1e-2),
    st.floats(1e-3, 1),
    st.floats(0, 1),
    st.integers(1, 64),
)
def test_a_step_takes_as_long_as_it_should(
    base_s: float, token_s: float, max_step_s: float, min_share: float, num_decodes: int
) -> None:
    """Or it has the least chunk, or prompts have no more than their share of the time."""
    cost = cost_of(base_s, token_s, [1, 64, 1000])
    limit = PrefillLimit(max_step_s, min_share)
    chunk = limit.max_tokens(cost, num_decodes)
    assert chunk is not None
    assert chunk >= MIN_CHUNK
    whole_s = base_s + (num_decodes + chunk) * token_s
    share_s = (chunk - 1) * token_s
    in_time = whole_s <= max_step_s * 1.01 + 1e-4
    assert in_time or share_s <= min_share * max_step_s * 1.01 + 1e-4 or chunk == MIN_CHUNK
    # More decodes leave prompts less, more time or a larger share more.
    fewer = limit.max_tokens(cost, num_decodes + 5)
    more = PrefillLimit(2 * max_step_s, min_share).max_tokens(cost, num_decodes)
    assert fewer is not None
    assert more is not None
    assert fewer <= chunk <= more


def test_nothing_is_limited_without_decodes_or_a_limit_or_a_measured_step() -> None:
    cost, limit = cost_of(0.01, 1e-3, [1, 64]), PrefillLimit(0.02)
    assert limit.max_tokens(cost, 0) is None
    assert limit.max_tokens(StepCost(), 5) is None
    assert PrefillLimit().max_tokens(cost, 5) is None
    assert limit.max_tokens(cost, 5) == MIN_CHUNK


def make_scheduler(limit: PrefillLimit, num_blocks: int = 600) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(pool, 8, 256, 300, prefill_limit=limit)
    for size in (1, 100, 200):
        scheduler.step_cost.observe(size, 0.01 + size * 1e-3)
    return scheduler


def chunks(scheduler: Scheduler) -> dict[Sequence, int]:
    batch = scheduler.schedule()
    advance(scheduler, batch)
    return {s.sequence: s.num_new_tokens for s in batch.scheduled}


def test_prompts_get_the_time_that_decodes_leave() -> None:
    # 10 ms + 1 ms for each token: 40 tokens fit into 50 ms, one of which is decoded.
    scheduler = make_scheduler(PrefillLimit(0.05, 0.0))
    short, long, other = (
        make_sequence(4, 60),
        make_sequence(70, first=7),
        make_sequence(20, first=8),
    )
    scheduler.add(short)
    assert chunks(scheduler) == {short: 4}
    scheduler.add(long)
    scheduler.add(other)
    assert chunks(scheduler) == {short: 1, long: 39}
    assert chunks(scheduler) == {short: 1, long: 31, other: 8}
    # Two decode now.
    assert chunks(scheduler) == {short: 1, long: 1, other: 12}


def test_alone_a_prompt_takes_the_whole_step() -> None:
    scheduler = make_scheduler(PrefillLimit(0.05))
    long, other = make_sequence(200), make_sequence(100, first=8)
    scheduler.add(long)
    scheduler.add(other)
    assert chunks(scheduler) == {long: 200, other: 56}


@given(st.integers(0, 2**32), st.floats(0.001, 0.3), st.floats(0, 1))
def test_all_sequences_end_under_any_limit(seed: int, max_step_s: float, min_share: float) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(PrefillLimit(max_step_s, min_share), num_blocks=150)
    left = [make_sequence(rng.randint(1, 200), rng.randint(1, 20), n) for n in range(12)]
    num_steps = 0
    while left or scheduler.num_running or scheduler.num_waiting:
        if left and rng.random() < 0.5:
            scheduler.add(left.pop())
        batch = scheduler.schedule()
        assert batch.num_tokens <= 256
        scheduler.step_cost.observe(max(1, batch.num_tokens), rng.uniform(1e-4, 0.5))
        advance(scheduler, batch)
        num_steps += 1
        assert num_steps < 5000


@given(st.floats(0, 0.05), st.floats(1e-5, 1e-2), st.integers(1, 512))
def test_the_batch_lane_makes_a_step_half_as_long_again_at_most(
    base_s: float, token_s: float, num_interactive: int
) -> None:
    cost = cost_of(base_s, token_s, [1, 64] * 20)
    limit = max_batch_tokens(cost, num_interactive)
    assert limit is not None
    assert limit >= 1
    step_s = base_s + num_interactive * token_s
    if limit > 1:
        assert limit * token_s <= BATCH_SHARE * step_s * 1.01 + 1e-6


@given(st.floats(0, 0.05), st.floats(1e-5, 1e-2))
def test_steps_of_the_batch_lane_alone_are_short(base_s: float, token_s: float) -> None:
    limit = max_batch_tokens(cost_of(base_s, token_s, [1, 64] * 20), 0)
    assert limit is not None
    assert limit >= MIN_CHUNK
    if limit > MIN_CHUNK:
        assert base_s + limit * token_s <= max(BATCH_STEP_S, 2 * base_s) * 1.01 + 1e-4


def test_the_batch_lane_has_no_limit_before_a_step_was_measured() -> None:
    assert max_batch_tokens(StepCost(), 0) is None
    assert max_batch_tokens(StepCost(), 8) is None
