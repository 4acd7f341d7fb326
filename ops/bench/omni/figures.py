"""Figures of speeches. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from ops.harness.samples import Samples


class Spoken(NamedTuple):
    """One speech, as its client received it."""

    first_s: float
    """Time to the first samples."""
    last_s: float
    """Time to the last samples."""
    sound_s: float
    """Length of the sound."""
    sound: bytes


class Level(NamedTuple):
    """Figures of speeches at one level of concurrency."""

    at_once: int
    first_p50_ms: float
    first_p99_ms: float
    realtime_factor: float
    """Median of a speech's time divided by the length of its sound."""
    throughput: float
    """Seconds of sound that were made in a second."""


def level_of(at_once: int, spoken: Sequence[Spoken], wall_s: float) -> Level:
    first_ms = Samples(1000 * speech.first_s for speech in spoken)
    factors = Samples(speech.last_s / speech.sound_s for speech in spoken if speech.sound_s)
    sound_s = sum(speech.sound_s for speech in spoken)
    return Level(at_once, first_ms.median, first_ms.p99, factors.median, sound_s / wall_s)
