"""What is measured of speeches. Pure."""

from collections.abc import Sequence
from typing import NamedTuple


class Spoken(NamedTuple):
    """One speech, as its client had it."""

    first_s: float
    """Time to the first samples."""
    last_s: float
    """Time to the last samples."""
    sound_s: float
    """Length of the sound."""
    sound: bytes


class Level(NamedTuple):
    """Speeches of which so many were made at once."""

    at_once: int
    first_p50_ms: float
    first_p99_ms: float
    realtime_factor: float
    """Median of the time that a speech took, by the length of its sound."""
    throughput: float
    """Seconds of sound that were made in a second."""


def level_of(at_once: int, spoken: Sequence[Spoken], wall_s: float) -> Level:
    first = sorted(1000 * one.first_s for one in spoken)
    factors = sorted(one.last_s / one.sound_s for one in spoken if one.sound_s)
    return Level(
        at_once,
        percentile(first, 50),
        percentile(first, 99),
        percentile(factors, 50),
        sum(one.sound_s for one in spoken) / wall_s,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The percentile of sorted values, of which there is at least one."""
    return values[min(len(values) - 1, len(values) * percent // 100)]
