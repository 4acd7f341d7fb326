"""Properties of the rate at which an engine writes records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.record_rate import MAX_SHARE, MIN_RATE, NUM_REMEMBERED, RecordRate

LIMIT = 400.0


def write(rate: RecordRate, now_s: float, num_at_once: int, took_s: float) -> float:
    """Write records that begin at once and end one after the other; return the time of the end."""
    for _ in range(num_at_once):
        rate.begin(now_s)
    for number in range(1, num_at_once + 1):
        rate.end(now_s + took_s * number / num_at_once)
    return now_s + took_s


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0, 5), st.floats(0, 5)), max_size=40),
    st.floats(0.001, 5000),
)
def test_the_rate_is_within_its_bounds(
    rounds: list[tuple[int, float, float]], limit: float
) -> None:
    rate, now_s = RecordRate(limit), 0.0
    assert rate.per_s == pytest.approx(MIN_RATE * limit)
    for num_at_once, took_s, pause_s in rounds:
        now_s = write(rate, now_s, num_at_once, took_s) + pause_s
        assert MIN_RATE * limit <= rate.per_s <= limit


@given(st.integers(1, 64), st.floats(0.0001, 0.02))
def test_records_are_written_for_a_share_of_the_time(num_at_once: int, cost_s: float) -> None:
    rate, now_s, took_s = RecordRate(LIMIT), 0.0, num_at_once * cost_s
    periods_s: list[float] = []
    for _ in range(10 * NUM_REMEMBERED // num_at_once):
        write(rate, now_s, num_at_once, took_s)
        periods_s.append(num_at_once / rate.per_s)
        now_s += max(took_s, periods_s[-1])
    allowed = min(LIMIT, max(MIN_RATE * LIMIT, MAX_SHARE / cost_s))
    assert num_at_once / periods_s[-1] == pytest.approx(allowed, rel=0.02)


@given(st.floats(1, 60), st.integers(1, 64))
def test_a_stall_of_the_disk_is_forgotten(stall_s: float, num_at_once: int) -> None:
    rate, cost_s = RecordRate(LIMIT), MAX_SHARE / 300
    now_s = write(rate, 0.0, num_at_once, stall_s)
    assert rate.per_s == pytest.approx(MIN_RATE * LIMIT)
    for _ in range(-(-20 * NUM_REMEMBERED // num_at_once)):
        now_s = write(rate, now_s, num_at_once, num_at_once * cost_s)
    assert rate.per_s == pytest.approx(300, rel=0.05)


def test_appends_that_overlap_without_a_pause_are_measured() -> None:
    rate = RecordRate(LIMIT)
    rate.begin(0.0)
    for number in range(1, 4 * NUM_REMEMBERED):
        rate.begin(number * 0.002)
        rate.end(number * 0.002)
    assert rate.per_s == pytest.approx(MAX_SHARE / 0.002, rel=0.02)


def test_the_rate_rises_within_a_few_records_of_each_stream_after_prompts() -> None:
    rate, now_s = RecordRate(LIMIT), 0.0
    for took_s in [0.32] * 8 + [0.064] * 4:
        now_s = write(rate, now_s, 32, took_s)
    assert rate.per_s > 250  # 333 in the end
