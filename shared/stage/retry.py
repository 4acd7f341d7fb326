"""Retry policy: repeat a failed or unfinished attempt, answer with an error, or give up. Pure.

The number of deliveries is not counted, because a drain, a restart of the broker or a lost
connection also causes a delivery, without a fault of the request. Workers record their attempts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shared.config.schema import DeliveryConfig
from shared.errors import (
    DeadlineExceeded,
    DiskFull,
    EncodingFailed,
    GrammarNotTried,
    OutOfMemory,
    Overloaded,
    PagemillError,
    Poisoned,
    RequestError,
    StageBusy,
    Unavailable,
    WorkerFailure,
)
from shared.protocol.messages import AttemptRecord


@dataclass(frozen=True, slots=True)
class AnswerWithError:
    """Answer with the error, and acknowledge. Another attempt would fail in the same way, or is
    the client's choice because it may take long."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    after_s: float
    failed: bool
    """Whether the attempt counts as a failure. It does not if the broker is full or unavailable."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Store the input as a dead letter, answer with the error, and acknowledge."""


Decision = AnswerWithError | RetryLater | GiveUp

ONLY_CLIENTS_RETRY = (
    RequestError,
    DeadlineExceeded,
    DiskFull,
    EncodingFailed,
    GrammarNotTried,
    OutOfMemory,
    StageBusy,
)

# Delays double from `retry_delay_s` up to this limit. Longer ones only add to the client's wait.
MAX_DELAY_S = 30.0


def decide(
    error: PagemillError, failures: int, policy: DeliveryConfig, jitter: float = 0.0
) -> Decision:
    """Return the reaction to `error` after a number of earlier failures.

    `jitter` in [0, 1) spreads the retries of many requests over half of the delay.
    """
    if isinstance(error, ONLY_CLIENTS_RETRY):
        return AnswerWithError()
    failed = not isinstance(error, Overloaded | Unavailable)
    if not error.retryable or (failed and failures + 1 >= policy.max_deliver):
        return GiveUp()
    delay_s = min(policy.retry_delay_s * 2 ** min(failures, 16), MAX_DELAY_S)
    return RetryLater(delay_s * (1.0 - jitter / 2), failed)


@dataclass(frozen=True, slots=True)
class History:
    """Numbers of failed attempts of one stage at one request, and of workers that died."""

    failures: int
    """Attempts that failed or have no recorded end, and added nothing to the log."""
    deaths: int
    """Dead workers among the workers of such attempts."""
    is_resumed: bool = False
    """Whether the last attempt added to the log, and its worker has died. Attempts that were
    requeued and added nothing are not counted."""


NO_HISTORY = History(0, 0)


def latest_records(records: Sequence[AttemptRecord], stage: str) -> list[AttemptRecord]:
    """Return the latest record of each attempt of one stage, in the order of their beginnings.

    `records` are in the order in which they were written. After a loss of all records, a worker
    writes its own again.
    """
    own = (a for a in records if a.stage == stage and not a.unread)
    latest = {(a.worker, a.number, a.began_ms): a for a in own}
    return sorted(latest.values(), key=lambda attempt: attempt.began_ms)


def recount(
    records: Sequence[AttemptRecord], stage: str, log_len: int, dead: Collection[str]
) -> History:
    """Return the history of a request.

    `records` are as in `latest_records`. `log_len` is the present length of the token log, and
    `dead` has the names of dead workers.

    An attempt that added to the log does not count, however it ended. A request that kills workers
    does so before it has an output, and the worker of a long answer may change many times.
    """
    attempts = latest_records(records, stage)
    lengths = [a.log_len for a in attempts] + [log_len]
    advanced = [after > before for before, after in pairwise(lengths)]
    # An attempt that was requeued and added nothing says nothing about the request.
    counted = [
        (attempt, has_advanced)
        for attempt, has_advanced in zip(attempts, advanced, strict=True)
        if has_advanced or attempt.outcome != "requeued"
    ]
    stuck = [attempt for attempt, has_advanced in counted if not has_advanced]
    # A worker may have had the request twice, but has died once.
    deaths = len({a.worker for a in stuck if a.outcome == "open"} & set(dead))
    last, has_advanced = counted[-1] if counted else (None, False)
    is_resumed = (
        last is not None and has_advanced and last.outcome == "open" and last.worker in dead
    )
    return History(len(stuck), deaths, is_resumed)


def verdict(history: History, policy: DeliveryConfig) -> PagemillError | None:
    """Return the error of a request that must not be tried again, or None."""
    if history.deaths >= policy.max_deaths:
        return Poisoned(f"{history.deaths} workers died while they processed this request")
    if history.failures >= policy.max_deliver:
        return WorkerFailure(f"given up after {history.failures} attempts without an answer")
    return None
