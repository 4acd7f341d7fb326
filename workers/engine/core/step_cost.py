"""Estimated time of a step by its number of tokens, and limits that are derived from it. Pure."""

import math
from dataclasses import dataclass

DECAY = 0.95
"""Factor on the weight of earlier steps at each new one: about twenty steps count."""
MIN_CHUNK = 16
"""Number of prompt tokens that every step may have."""
BATCH_SHARE = 0.5
"""Batch sequences may make a step with interactive sequences longer by at most this fraction."""
BATCH_STEP_S = 0.005
"""Target time of a step with batch sequences only, because an interactive sequence may have to wait
for its end. Where a step without tokens already takes more than half of it, the step may take twice
the time of one without tokens."""


@dataclass(eq=False, slots=True)
class StepCost:
    """A line through the measured steps, by weighted least squares; later steps count more."""

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a step that has run."""
        self._weight = DECAY * self._weight + 1
        self._tokens = DECAY * self._tokens + num_tokens
        self._seconds = DECAY * self._seconds + seconds
        self._squares = DECAY * self._squares + num_tokens**2
        self._products = DECAY * self._products + num_tokens * seconds

    @property
    def is_known(self) -> bool:
        return self._seconds > 0

    def line(self) -> tuple[float, float]:
        """Return the seconds of a step without tokens, and the seconds per token; neither is < 0.

        If the steps do not determine both, for example because all have one size, the time counts
        as proportional to the number of tokens.
        """
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_tokens**2
        if variance > 1e-9 * mean_tokens**2:
            slope = (self._products / self._weight - mean_tokens * mean_s) / variance
            if slope > 0 and slope * mean_tokens <= mean_s:
                return mean_s - slope * mean_tokens, slope
        return 0.0, mean_s / mean_tokens


@dataclass(frozen=True, slots=True)
class PrefillLimit:
    """Division of a step's time between decoding sequences and prompts."""

    max_step_s: float = math.inf
    """Longest time that a step with decodes should take."""
    min_share: float = 0.5
    """Minimum share of prompts in that time: the budget for first tokens under load."""

    def max_tokens(self, cost: StepCost, num_decode_tokens: int) -> int | None:
        """Return the limit on prompt tokens in a step with decode tokens; None for no limit.

        A step without decodes delays no other sequence, and has no limit.
        """
        if num_decode_tokens == 0 or not cost.is_known or math.isinf(self.max_step_s):
            return None
        base_s, token_s = cost.line()
        left_s = self.max_step_s - base_s - num_decode_tokens * token_s
        guaranteed_s = self.min_share * self.max_step_s
        return max(MIN_CHUNK, math.floor(max(left_s, guaranteed_s) / token_s))


def max_batch_tokens(cost: StepCost, num_interactive_tokens: int) -> int | None:
    """Return the limit on tokens of the batch lane in a step; None for no limit.

    A GPU reads the weights once for all tokens of a step, so tokens of the batch lane cost little,
    and many are allowed. A step without interactive tokens is kept short, because interactive
    sequences are expected soon.
    """
    if not cost.is_known:
        return None
    base_s, token_s = cost.line()
    if num_interactive_tokens == 0:
        return max(MIN_CHUNK, math.floor(max(BATCH_STEP_S - base_s, base_s) / token_s))
    step_s = base_s + num_interactive_tokens * token_s
    return max(1, math.floor(BATCH_SHARE * step_s / token_s))


UNLIMITED = PrefillLimit()
