"""What becomes of a delivery that failed: a decision from the error and the number of attempts."""

from dataclasses import dataclass

from shared.config import DeliveryConfig
from shared.errors import PagemillError, RequestError


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the client and acknowledge: another attempt would fail in the same way."""


@dataclass(frozen=True, slots=True)
class Retry:
    after_s: float


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Keep the input for an operator, tell the client, and acknowledge."""


Decision = Answer | Retry | DeadLetter

# Doubling from `retry_delay_s`; beyond this a longer pause only adds to the client's wait.
MAX_DELAY_S = 30.0


def decide(error: PagemillError, attempt: int, policy: DeliveryConfig) -> Decision:
    """`attempt` counts deliveries from 1."""
    if isinstance(error, RequestError):
        return Answer()
    if error.retryable and attempt < policy.max_deliver:
        return Retry(min(policy.retry_delay_s * 2 ** (attempt - 1), MAX_DELAY_S))
    return DeadLetter()
