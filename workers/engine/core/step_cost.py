"""Measured time of a step by its work, and the limit on prompts that is derived from it. Pure."""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from statistics import median_low

MIN_CHUNK = 16
"""Number of prompt tokens that every step may have."""
NUM_TIMES = 9
"""Measured times that count for each size of a step. Their median ignores up to four outliers, such
as a first step that compiles kernels, or a pause of the process."""
MAX_AGE = 2000
"""Steps after which the times of a size are forgotten, because the machine may have changed."""

MIN_S = 1e-6
"""Shortest time of a step that counts, so that no step is free."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step, by kind."""

    num_decodes: int = 0
    """Tokens of sequences that decode: the last token of each, and its drafts."""
    num_prompt_tokens: int = 0
    num_item_tokens: int = 0
    """Prompt tokens that stand for the items which the step encodes."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.num_decodes + self.num_prompt_tokens


class _Size:
    """The last steps of about the same number of tokens."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_TIMES)
        self.last_step = 0
        self.median_tokens = self.median_s = 0.0

    def add(self, step: int, num_tokens: int, seconds: float) -> None:
        self.last_step = step
        self._steps.append((num_tokens, seconds))
        self.median_tokens = median_low(n for n, _ in self._steps)
        # Only disturbances make a step longer, so an early outlier is not the middle of two times.
        self.median_s = median_low(s for _, s in self._steps)


class TimeCurve:
    """Time of a step by its number of tokens.

    The curve goes through one point for each size that was measured, where a size is a range of
    numbers up to the factor 1.4, and is straight between them. It is no straight line as a whole: a
    CPU and a GPU read the weights once for all tokens of a step, so the first tokens cost almost
    nothing, and later ones the time of their products.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0
        self._tokens: list[float] = []
        self._seconds: list[float] = []
        """Corners of the curve. Both lists rise. The last corner is extrapolated."""

    @property
    def is_known(self) -> bool:
        return bool(self._tokens)

    @property
    def least_s(self) -> float:
        """Time of a step of one token, or of the measured size if there is only one."""
        return self.seconds(1) if len(self._sizes) > 1 else self._seconds[1]

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a step that has run."""
        self._num_steps += 1
        size = self._sizes.setdefault(round(2 * math.log2(num_tokens)), _Size())
        size.add(self._num_steps, num_tokens, max(seconds, MIN_S))
        oldest = self._num_steps - MAX_AGE
        self._sizes = {key: size for key, size in self._sizes.items() if size.last_step >= oldest}
        self._draw()

    def seconds(self, num_tokens: float) -> float:
        """Return the time of a step with this number of tokens."""
        tokens, seconds = self._tokens, self._seconds
        right = bisect_right(tokens, num_tokens)
        if right == len(tokens):
            return seconds[-1] * num_tokens / tokens[-1]
        share = (num_tokens - tokens[right - 1]) / (tokens[right] - tokens[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

    def max_tokens(self, limit_s: float) -> int:
        """Return the largest number of tokens that a step computes in this time."""
        tokens, seconds = self._tokens, self._seconds
        right = bisect_right(seconds, limit_s)
        if right == 0:
            return 0
        if right == len(seconds):
            return math.floor(tokens[-1] * limit_s / seconds[-1])
        share = (limit_s - seconds[right - 1]) / (seconds[right] - seconds[right - 1])
        return math.floor(tokens[right - 1] + share * (tokens[right] - tokens[right - 1]))

    def _draw(self) -> None:
        """Draw the curve through the medians of all sizes, and extrapolate it at both ends."""
        sizes = [self._sizes[key] for key in sorted(self._sizes)]
        tokens = [size.median_tokens for size in sizes]
        seconds = [size.median_s for size in sizes]
        for i in range(len(sizes) - 2, -1, -1):
            # More tokens cannot take less time: the times of the smaller size were disturbed.
            seconds[i] = min(seconds[i], seconds[i + 1])
        first_s = max(0.0, seconds[0] - tokens[0] * self._slope(tokens, seconds, 0))
        # A flat slope must not lead to steps that are many times as large as any before.
        last_s = seconds[-1] + tokens[-1] * self._slope(tokens, seconds, -1)
        self._tokens = [0.0, *tokens, 2 * tokens[-1]]
        self._seconds = [min(first_s, seconds[0]), *seconds, last_s]

    @staticmethod
    def _slope(tokens: list[float], seconds: list[float], end: int) -> float:
        """Return the seconds of a token at an end of the curve: over a factor of two in tokens,
        because the slope between neighbours is mostly noise. A single point has the time of its
        tokens alone."""
        if end == 0:
            other = next((i for i, n in enumerate(tokens) if n >= 2 * tokens[0]), len(tokens) - 1)
        else:
            halves = [i for i, n in enumerate(tokens) if 2 * n <= tokens[-1]]
            other = halves[-1] if halves else 0
        if tokens[other] == tokens[end]:
            return seconds[end] / tokens[end]
        return (seconds[other] - seconds[end]) / (tokens[other] - tokens[end])


class StepCost:
    """Measured time of a step by its kinds of work.

    Prompts and items take time in addition to decodes. A decode may cost more than a token of a
    prompt, because it is sampled, or less, because a GPU computes decodes alone from a recorded
    graph.
    """

    def __init__(self) -> None:
        self._decodes = TimeCurve()
        self._prompts = TimeCurve()
        """Time of prompts in addition to decodes; of whole steps until decodes are known."""
        self._item_times: deque[float] = deque(maxlen=NUM_TIMES)
        """Seconds per token of the last encoded items."""

    @property
    def is_known(self) -> bool:
        return self._decodes.is_known or self._prompts.is_known

    @property
    def least_s(self) -> float:
        """Time that every step takes, also with one token of a prompt. A step must be known."""
        if not self._decodes.is_known:
            return self._prompts.least_s
        return self._decodes.least_s + self._prompts_s(1)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Add a step that has run."""
        if work.num_item_tokens:
            known_s = self.seconds(work.num_decodes, work.num_prompt_tokens)
            self._item_times.append(max(0.0, seconds - known_s) / work.num_item_tokens)
        elif work.num_prompt_tokens == 0:
            self._decodes.observe(work.num_decodes, seconds)
        elif self._decodes.is_known:
            decodes_s = self._decodes.seconds(work.num_decodes)
            self._prompts.observe(work.num_prompt_tokens, seconds - decodes_s)
        else:
            self._prompts.observe(work.num_tokens, seconds)

    def seconds(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """Return the time of a step without items; 0 if nothing is known."""
        if self._decodes.is_known:
            prompts_s = self._prompts_s(num_prompt_tokens) if num_prompt_tokens else 0.0
            return self._decodes.seconds(num_decodes) + prompts_s
        if self._prompts.is_known:
            return self._prompts.seconds(num_decodes + num_prompt_tokens)
        return 0.0

    def max_decodes(self, limit_s: float, num_prompt_tokens: int) -> int:
        """Return the most decodes of a step next to prompt tokens. A step must be known."""
        if not self._decodes.is_known:
            return self._prompts.max_tokens(limit_s) - num_prompt_tokens
        prompts_s = self._prompts_s(num_prompt_tokens) if num_prompt_tokens else 0.0
        return self._decodes.max_tokens(limit_s - prompts_s)

    def max_prompt_tokens(self, limit_s: float, num_decodes: int) -> int:
        """Return the most prompt tokens of a step next to decodes. A step must be known."""
        if not self._decodes.is_known:
            return self._prompts.max_tokens(limit_s) - num_decodes
        left_s = limit_s - self._decodes.seconds(num_decodes)
        if self._prompts.is_known:
            return self._prompts.max_tokens(left_s)
        return self._decodes.max_tokens(left_s + self._decodes.seconds(0))

    def item_seconds(self, num_tokens: int) -> float:
        """Return the time of encoding an item; 0 if none has been encoded yet."""
        return num_tokens * median_low(self._item_times) if self._item_times else 0.0

    def _prompts_s(self, num_tokens: int) -> float:
        """Return the time of prompts in addition to decodes, which must be known."""
        if self._prompts.is_known:
            return self._prompts.seconds(num_tokens)
        return self._decodes.seconds(num_tokens) - self._decodes.seconds(0)


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
        decodes_s = cost.seconds(num_decode_tokens, 0)
        limit_s = max(self.max_step_s, decodes_s + self.min_share * self.max_step_s)
        return max(MIN_CHUNK, cost.max_prompt_tokens(limit_s, num_decode_tokens))


UNLIMITED = PrefillLimit()
