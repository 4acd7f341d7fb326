"""The time of a step by its work, and the limit on prompts in a step with decodes."""

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
    MAX_AGE,
    MIN_CHUNK,
    NUM_TIMES,
    PrefillLimit,
    StepCost,
    StepWork,
    TimeCurve,
)

counts = st.integers(1, 4096)
seconds = st.floats(1e-5, 10)


def curve_of(base_s: float, token_s: float, sizes: list[int]) -> TimeCurve:
    curve = TimeCurve()
    for size in sizes:
        curve.observe(size, base_s + size * token_s)
    return curve


def cost_of(base_s: float, token_s: float, sizes: list[int]) -> StepCost:
    """The same line for steps with prompts and without."""
    cost = StepCost()
    observe_line(cost, base_s, token_s, sizes)
    return cost


def observe_line(cost: StepCost, base_s: float, token_s: float, sizes: list[int]) -> None:
    for work in (*(StepWork(size) for size in sizes), *(StepWork(0, size) for size in sizes)):
        cost.observe(work, base_s + work.num_tokens * token_s)


@given(
    st.floats(0, 1),
    st.floats(1e-5, 1e-2),
    st.lists(counts, min_size=2, max_size=30).filter(lambda sizes: max(sizes) > 2 * min(sizes)),
)
def test_a_line_is_found_and_continued(base_s: float, token_s: float, sizes: list[int]) -> None:
    curve = curve_of(base_s, token_s, sizes)
    for size in (0, 1, *sizes, 1.4 * max(sizes)):
        assert curve.seconds(size) == pytest.approx(base_s + size * token_s, rel=0.01, abs=1e-4)


def test_tokens_that_cost_nothing_are_found() -> None:
    """A machine reads its weights in 10 ms, and computes ten tokens in this time."""
    curve = TimeCurve()
    for size in (1, 2, 4, 8, 10, 16, 32, 64):
        curve.observe(size, max(0.01, 0.001 * size))
    assert curve.max_tokens(0.0101) == 10
    assert curve.max_tokens(0.0125) == 12
    assert curve.seconds(48) == pytest.approx(0.048)


@given(st.lists(st.tuples(counts, seconds), min_size=1, max_size=60), st.floats(1e-6, 20))
def test_any_steps_have_a_curve_that_rises(steps: list[tuple[int, float]], limit_s: float) -> None:
    curve = TimeCurve()
    for size, took_s in steps:
        curve.observe(size, took_s)
    times = [curve.seconds(size) for size in (0, 1, 3, 10, 100, 1000, 10_000, 10**6)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < math.inf
    most = curve.max_tokens(limit_s)
    if most:
        assert curve.seconds(most) <= limit_s * 1.000001
    if limit_s >= times[0]:
        assert curve.seconds(most + 1) >= limit_s * 0.999999


@given(
    st.lists(st.floats(0.9, 1.1), min_size=NUM_TIMES // 2 + 1, max_size=NUM_TIMES),
    st.lists(st.floats(0, 1e6), max_size=NUM_TIMES // 2),
    st.randoms(),
)
def test_a_few_outliers_change_nothing(
    usual: list[float], outliers: list[float], rng: random.Random
) -> None:
    """As many as half of the times that count, such as the first step, or a pause."""
    times = (usual + outliers)[:NUM_TIMES]
    rng.shuffle(times)
    curve = TimeCurve()
    for time_s in times:
        curve.observe(8, time_s)
    assert 0.9 <= curve.seconds(8) <= 1.1


def test_a_slow_step_of_one_size_is_corrected_by_a_faster_one_of_more_tokens() -> None:
    curve = TimeCurve()
    curve.observe(16, 5.0)
    curve.observe(32, 0.02)
    assert curve.seconds(16) <= 0.02


def test_a_machine_that_slows_down_is_noticed_within_five_steps() -> None:
    curve = curve_of(0.01, 1e-4, [8, 256] * 50)
    for size in [8, 256] * 5:
        curve.observe(size, 3 * (0.01 + size * 1e-4))
    assert curve.seconds(100) == pytest.approx(3 * 0.02)


def test_a_size_that_no_longer_occurs_is_forgotten() -> None:
    curve = TimeCurve()
    curve.observe(64, 9.0)
    for _ in range(MAX_AGE + 1):
        curve.observe(1, 0.01)
        curve.observe(8, 0.01)
    assert curve.seconds(8) == 0.01
    assert curve.max_tokens(0.02) > 16


def test_prompts_cost_what_they_add_to_decodes() -> None:
    """A machine needs 10 ms, 1 ms for a decode, 0.1 ms for a prompt's token, 5 ms for any."""
    cost = StepCost()
    assert not cost.is_known
    for num_decodes in (1, 2, 4, 8, 16, 32):
        cost.observe(StepWork(num_decodes), 0.01 + 0.001 * num_decodes)
    assert cost.seconds(0, 20) == pytest.approx(0.03), "nothing better is known"
    for num_decodes, num_prompt_tokens in ((1, 10), (30, 50), (8, 200), (0, 400)):
        seconds = 0.015 + 0.001 * num_decodes + 0.0001 * num_prompt_tokens
        cost.observe(StepWork(num_decodes, num_prompt_tokens), seconds)
    assert cost.seconds(20, 0) == pytest.approx(0.03)
    assert cost.seconds(20, 100) == pytest.approx(0.045)
    assert cost.max_prompt_tokens(0.045001, 20) == 100
    assert cost.max_decodes(0.045001, 100) == 20
    assert cost.max_prompt_tokens(0.02, 20) == 0
    assert cost.least_s == pytest.approx(0.0161)


def test_prompts_alone_have_a_time_too() -> None:
    """An engine for embeddings decodes nothing."""
    cost = StepCost()
    for num_tokens in (8, 64, 512):
        cost.observe(StepWork(0, num_tokens), 0.01 + 0.001 * num_tokens)
    assert cost.seconds(0, 100) == pytest.approx(0.11)
    assert cost.max_prompt_tokens(0.110001, 0) == 100
    assert cost.least_s == pytest.approx(0.011)


def test_an_item_costs_what_its_step_took_in_addition() -> None:
    cost = cost_of(0.01, 0.001, [1, 10, 100])
    assert cost.item_seconds(50) == 0
    for _ in range(5):
        cost.observe(StepWork(1, 9, num_item_tokens=8), 0.02 + 0.4)
    cost.observe(StepWork(1, 9, num_item_tokens=8), 30.0)
    assert cost.item_seconds(16) == pytest.approx(0.8, rel=0.01)
    assert cost.seconds(1, 9) == pytest.approx(0.02, rel=0.01)


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
    observe_line(scheduler.step_cost, 0.01, 1e-3, [1, 100, 200])
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
        if batch.scheduled:
            scheduler.observe(batch.work(), rng.uniform(1e-4, 0.5))
        advance(scheduler, batch)
        num_steps += 1
        assert num_steps < 5000
