"""Measured values and their percentiles, and the order in which setups take turns."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

S = TypeVar("S")


class Samples(list[float]):
    """Measured values of one quantity."""

    def percentile(self, percent: float) -> float:
        """Return a percentile, interpolated between the two nearest values."""
        ordered = sorted(self)
        place = (len(ordered) - 1) * percent / 100
        lower = ordered[math.floor(place)]
        return lower + (ordered[math.ceil(place)] - lower) * (place % 1)

    @property
    def median(self) -> float:
        return self.percentile(50)

    @property
    def p95(self) -> float:
        return self.percentile(95)

    @property
    def p99(self) -> float:
        return self.percentile(99)

    def interval(self) -> tuple[float, float]:
        """Return an interval that contains the median of the distribution in 95 of 100 cases.

        Its ends are 1.96 standard deviations of a binomial distribution from the middle, in ranks.
        """
        ordered = sorted(self)
        rank = max(1, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
        return ordered[rank - 1], ordered[-rank]


def in_turns(setups: Sequence[S], rounds: int, warm_ups: int = 0) -> Iterator[tuple[int, S]]:
    """Yield each setup once in every round, with the number of the round.

    A slow minute of the machine then affects all setups. Every other round has the reverse order.
    The rounds of the warm-up have negative numbers.
    """
    for number in range(-warm_ups, rounds):
        for setup in setups[:: -1 if number % 2 else 1]:
            yield number, setup
