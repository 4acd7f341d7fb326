"""Pace of a batch, and the forecast whether its window is long enough. Pure."""

from collections import deque

SPAN_S = 600.0
"""Time over which the pace is measured."""
MIN_SPAN_S = 60.0
"""Time before the first forecast. Meanwhile the first workers may still start."""


class Pace:
    """Numbers of finished lines at some times."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def observe(self, at_s: float, num_finished: int) -> None:
        samples = self._samples
        samples.append((at_s, num_finished))
        while len(samples) > 2 and at_s - samples[1][0] >= SPAN_S:
            samples.popleft()

    def is_late(self, num_left: int, left_s: float) -> bool:
        """Return whether `num_left` lines take longer than `left_s` seconds at this pace."""
        if not self._samples:
            return False
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        span_s = last_s - first_s
        return span_s >= MIN_SPAN_S and num_left * span_s > left_s * (last - first)
