"""The retry policy: what was written down of earlier attempts decides, never the deliveries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config.schema import DeliveryConfig
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    DecodeError,
    EncodingFailed,
    GrammarNotTried,
    InvalidRequest,
    NumberOverflow,
    Overloaded,
    Poisoned,
    StageBusy,
    Unavailable,
    UnknownModel,
    WorkerFailure,
)
from shared.protocol.messages import AttemptRecord
from shared.stage.retry import (
    MAX_DELAY_S,
    AnswerWithError,
    GiveUp,
    History,
    RetryLater,
    decide,
    recount,
    verdict,
)

POLICY = DeliveryConfig(max_deliver=5, max_deaths=2, retry_delay_s=0.5)
failures = st.integers(min_value=0, max_value=10_000)
jitters = st.floats(min_value=0, max_value=1, exclude_max=True)


def attempt(
    worker: str, log_len: int = 0, outcome: str = "open", stage: str = "engine"
) -> AttemptRecord:
    return AttemptRecord(stage, worker, 1, float(ord(worker)), log_len, outcome)  # type: ignore[arg-type]


@given(failures)
def test_errors_that_would_repeat_are_answered_at_once(before: int) -> None:
    for error in (InvalidRequest("x"), UnknownModel("x"), Cancelled("x"), DeadlineExceeded("x")):
        assert decide(error, before, POLICY) == AnswerWithError()


@given(failures)
def test_errors_of_long_work_are_for_the_client_to_retry(before: int) -> None:
    for error in (GrammarNotTried("x"), EncodingFailed("x"), StageBusy("x")):
        assert error.retryable
        assert decide(error, before, POLICY) == AnswerWithError()


@given(failures)
def test_requests_that_no_worker_can_read_or_survive_become_dead_letters(before: int) -> None:
    for error in (DecodeError("x"), NumberOverflow("x"), Poisoned("x")):
        assert decide(error, before, POLICY) == GiveUp()


@given(failures, jitters)
def test_our_own_errors_are_retried_until_the_last_attempt(before: int, jitter: float) -> None:
    decision = decide(WorkerFailure("x"), before, POLICY, jitter)
    if before + 1 < POLICY.max_deliver:
        assert isinstance(decision, RetryLater)
        assert decision.failed
        assert POLICY.retry_delay_s / 2 <= decision.after_s <= MAX_DELAY_S
    else:
        assert decision == GiveUp()


@given(failures, jitters)
def test_a_broker_that_is_full_or_away_never_counts(before: int, jitter: float) -> None:
    for error in (Unavailable("x"), Overloaded("x")):
        decision = decide(error, before, POLICY, jitter)
        assert isinstance(decision, RetryLater)
        assert not decision.failed


def test_the_pause_doubles_and_jitter_takes_up_to_half_of_it() -> None:
    pauses = [decide(WorkerFailure("x"), before, POLICY) for before in (0, 1, 2)]
    assert pauses == [RetryLater(0.5, True), RetryLater(1.0, True), RetryLater(2.0, True)]
    assert decide(WorkerFailure("x"), 2, POLICY, 0.5) == RetryLater(1.5, True)


@pytest.mark.parametrize(
    ("records", "log_len", "dead", "expected"),
    [
        ([], 0, set(), History(0, 0)),
        ([attempt("a")], 0, set(), History(1, 0)),
        ([attempt("a")], 0, {"a"}, History(1, 1)),
        ([attempt("a"), attempt("b")], 0, {"a", "b"}, History(2, 2)),
        # The same attempt, requeued or failed later, counts once.
        ([attempt("a"), attempt("a", outcome="requeued")], 0, {"a"}, History(0, 0)),
        ([attempt("a"), attempt("a", outcome="failed")], 0, {"a"}, History(1, 0)),
        # Twice in the hands of the same worker, which has died once.
        (
            [attempt("a"), AttemptRecord("engine", "a", 2, 0.0, 0)],
            0,
            {"a"},
            History(2, 1),
        ),
        # It got further before it died.
        ([attempt("a")], 3, {"a"}, History(0, 0, is_resumed=True)),
        ([attempt("a")], 3, set(), History(0, 0)),
        (
            [attempt("a"), attempt("b", 3, outcome="requeued")],
            3,
            {"a"},
            History(0, 0, is_resumed=True),
        ),
        ([attempt("a"), attempt("b", 3, outcome="requeued")], 4, {"a"}, History(0, 0)),
        ([attempt("a", outcome="requeued")], 3, {"a"}, History(0, 0)),
        ([attempt("a", 0), attempt("b", 3)], 3, {"a", "b"}, History(1, 1)),
        ([attempt("a", 0), attempt("b", 0)], 3, {"a", "b"}, History(1, 1, is_resumed=True)),
        # Another stage's.
        ([attempt("r", stage="renderer")], 0, {"r"}, History(0, 0)),
    ],
)
def test_recounting(
    records: list[AttemptRecord], log_len: int, dead: set[str], expected: History
) -> None:
    assert recount(records, "engine", log_len, dead) == expected


attempts = st.builds(
    attempt,
    worker=st.sampled_from("abcdef"),
    log_len=st.integers(0, 5),
    outcome=st.sampled_from(["open", "failed", "requeued"]),
)


@given(st.lists(attempts, max_size=12), st.integers(0, 5), st.sets(st.sampled_from("abcdef")))
def test_a_request_is_never_given_up_for_being_handed_back(
    records: list[AttemptRecord], log_len: int, dead: set[str]
) -> None:
    history = recount(records, "engine", log_len, dead)
    assert 0 <= history.deaths <= history.failures <= len(records)
    returned = [
        AttemptRecord(a.stage, a.worker, a.number, a.began_ms, a.log_len, "requeued")
        for a in records
    ]
    assert recount([*records, *returned], "engine", log_len, dead) == History(0, 0)


def test_two_deaths_are_poison_and_too_many_failures_a_failure() -> None:
    assert verdict(History(1, 1), POLICY) is None
    assert isinstance(verdict(History(2, 2), POLICY), Poisoned)
    assert verdict(History(4, 0), POLICY) is None
    assert isinstance(verdict(History(5, 0), POLICY), WorkerFailure)
