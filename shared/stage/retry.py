"""What becomes of a request when an attempt at it has failed, or never said how it ended. Pure.

Deliveries are no measure of that: a drain, a restart of the broker or a lost connection delivers a
message once more without any fault of its own. What counts is written down by the workers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shared.config.schema import DeliveryConfig
from shared.errors import (
    DeadlineExceeded,
    EncodingFailed,
    GrammarNotTried,
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
    """Tell the client and acknowledge: another attempt would fail in the same way, or take too long
    for a client that can make it itself."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    after_s: float
    failed: bool
    """Whether it counts against the request; that the broker is full or away does not."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Keep the input for an operator, tell the client, and acknowledge."""


Decision = AnswerWithError | RetryLater | GiveUp

ONLY_CLIENTS_RETRY = (RequestError, DeadlineExceeded, EncodingFailed, GrammarNotTried, StageBusy)

# Doubling from `retry_delay_s`; beyond this a longer pause only adds to the client's wait.
MAX_DELAY_S = 30.0


def decide(
    error: PagemillError, failures: int, policy: DeliveryConfig, jitter: float = 0.0
) -> Decision:
    """What to do about `error` after `failures` earlier attempts that failed.

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
    """What the attempts of one stage at one request amount to."""

    failures: int
    """Attempts that failed or ended without a word, and got no further."""
    deaths: int
    """Workers of such attempts that are dead."""

    @property
    def suspect(self) -> bool:
        """A worker has died of it, or of another that it held at the same time."""
        return self.deaths > 0


NO_HISTORY = History(0, 0)


def recount(
    records: Sequence[AttemptRecord], stage: str, log_len: int, dead: Collection[str]
) -> History:
    """`records` in the order in which they were written; `log_len` is that of the token log now.

    An attempt that added to the log is not held against its request, however it ended: what kills a
    worker does so before it has an output, and a long answer outlives many workers.
    """
    own = (a for a in records if a.stage == stage and not a.unread)
    attempts = list({(a.worker, a.number, a.began_ms): a for a in own}.values())
    lengths = [a.log_len for a in attempts] + [log_len]
    stuck = [
        attempt
        for attempt, (before, after) in zip(attempts, pairwise(lengths), strict=True)
        if after <= before and attempt.outcome != "requeued"
    ]
    # A worker may have had it twice; it has died once.
    deaths = len({a.worker for a in stuck if a.outcome == "open"} & set(dead))
    return History(failures=len(stuck), deaths=deaths)


def verdict(history: History, policy: DeliveryConfig) -> PagemillError | None:
    """The error of a request that must not be tried again; None for one that may be."""
    if history.deaths >= policy.max_deaths:
        return Poisoned(f"{history.deaths} workers died with this request in hand")
    if history.failures >= policy.max_deliver:
        return WorkerFailure(f"given up after {history.failures} attempts without an answer")
    return None
