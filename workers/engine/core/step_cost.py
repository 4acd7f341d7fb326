"""How long a step takes by its tokens, and how many of some kinds one may have. Pure."""

import math
from dataclasses import dataclass

DECAY = 0.95
"""Weight of a measured step after each further one: some twenty steps count."""
MIN_CHUNK = 16
"""Prompt tokens that a step may have in any case."""
BATCH_SHARE = 0.5
"""Sequences of the batch lane may make a step with interactive ones longer by this part."""
BATCH_STEP_S = 0.005
"""Time of a step of the batch lane for which an interactive sequence may have to wait. It may be
longer where a step takes long without any tokens, of which it has twice the time."""


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
        """Return the seconds of a step without tokens, and those of each token; neither is < 0.

        Steps that do not tell both, such as steps of one size, count as proportional.
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
    """How the time of a step is shared between sequences that decode and prompts."""

    max_step_s: float = math.inf
    """Time that a step with decodes should take at most."""
    min_share: float = 0.5
    """Share of that time that prompts get in any case: the budget for first tokens under load."""

    def max_tokens(self, cost: StepCost, num_decode_tokens: int) -> int | None:
        """Return how many prompt tokens a step with so many others may have; None for any number.

        A step without decodes makes nobody wait, and has no limit.
        """
        if num_decode_tokens == 0 or not cost.is_known or math.isinf(self.max_step_s):
            return None
        base_s, token_s = cost.line()
        left_s = self.max_step_s - base_s - num_decode_tokens * token_s
        guaranteed_s = self.min_share * self.max_step_s
        return max(MIN_CHUNK, math.floor(max(left_s, guaranteed_s) / token_s))


def max_batch_tokens(cost: StepCost, num_interactive_tokens: int) -> int | None:
    """Return how many tokens of the batch lane a step may have; None for any number.

    Where weights are read once for all tokens of a step, as on a GPU, those of the batch lane cost
    little, and many are allowed. Without interactive tokens in the step, some are expected soon.
    """
    if not cost.is_known:
        return None
    base_s, token_s = cost.line()
    if num_interactive_tokens == 0:
        return max(MIN_CHUNK, math.floor(max(BATCH_STEP_S - base_s, base_s) / token_s))
    step_s = base_s + num_interactive_tokens * token_s
    return max(1, math.floor(BATCH_SHARE * step_s / token_s))


UNLIMITED = PrefillLimit()
