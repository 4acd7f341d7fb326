"""Priorities of the pulls of workers that share slots."""

from hypothesis import given
from hypothesis import strategies as st

from shared.bus.priorities import BUSY, FIRST_THIEF, load_of, priority_of

SHARES = st.floats(0, 1)
TOKENS = st.floats(0, 1e6)


@given(SHARES, SHARES)
def test_an_owner_is_served_before_workers_that_are_as_busy(load: float, more: float) -> None:
    owner, thief = (priority_of(load, is_owner=is_owner) for is_owner in (True, False))
    assert thief >= FIRST_THIEF
    assert owner <= thief
    for is_owner in (True, False):
        before = priority_of(load, is_owner=is_owner)
        assert 0 <= before <= priority_of(max(load, more), is_owner=is_owner) <= 9


def test_an_idle_worker_is_served_before_a_busy_owner() -> None:
    assert priority_of(BUSY, is_owner=True) < priority_of(0.0, is_owner=False)
    assert priority_of(BUSY + 0.01, is_owner=True) > priority_of(0.0, is_owner=False)


@given(SHARES, TOKENS, TOKENS)
def test_an_owner_with_more_tokens_ahead_than_a_hit_saves_is_busy(
    used: float, num_ahead: float, num_saved: float
) -> None:
    load = load_of(used, num_ahead, num_saved)
    assert 0 <= load <= 1
    if num_ahead + num_saved >= 1:
        # Up to the last bits of the division.
        assert (load > BUSY) == (used > BUSY or num_ahead > num_saved) or abs(load - BUSY) < 1e-9
