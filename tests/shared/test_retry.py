"""The retry policy: who is at fault and how often it was tried decide, nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from shared.config import DeliveryConfig
from shared.errors import DecodeError, InvalidRequest, Unavailable, UnknownModel, WorkerFailure
from shared.retry import MAX_DELAY_S, Answer, DeadLetter, Retry, decide

POLICY = DeliveryConfig(max_deliver=5, retry_delay_s=0.5)
attempts = st.integers(min_value=1, max_value=10_000)


@given(attempts)
def test_a_clients_error_is_answered_at_once(attempt: int) -> None:
    for error in (InvalidRequest("x"), UnknownModel("x")):
        assert decide(error, attempt, POLICY) == Answer()


@given(attempts)
def test_what_cannot_be_read_goes_to_the_dead_letters(attempt: int) -> None:
    assert decide(DecodeError("x"), attempt, POLICY) == DeadLetter()


@given(attempts)
def test_our_own_errors_are_retried_until_the_last_attempt(attempt: int) -> None:
    for error in (Unavailable("x"), WorkerFailure("x")):
        decision = decide(error, attempt, POLICY)
        if attempt < POLICY.max_deliver:
            assert isinstance(decision, Retry)
            assert POLICY.retry_delay_s <= decision.after_s <= MAX_DELAY_S
        else:
            assert decision == DeadLetter()


def test_the_pause_doubles() -> None:
    pauses = [decide(Unavailable("x"), attempt, POLICY) for attempt in (1, 2, 3)]
    assert pauses == [Retry(0.5), Retry(1.0), Retry(2.0)]
