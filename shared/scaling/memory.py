"""State of the policy between two looks, as values that it gets and returns. Pure."""

from collections.abc import Mapping
from itertools import takewhile

from msgspec import Struct

from shared.scaling.pools import PoolFigures, PoolSettings

RETRY_S = 60.0
"""Time after a given up start in which a pool requests no further worker."""
MAX_HOLD = 16
"""Limit on the time for which a pool stays large, in multiples of `idle_s`."""


class Peak(Struct, frozen=True):
    """Maximum need for workers since some moment."""

    at_s: float
    num_workers: int


class GivenUp(Struct, frozen=True):
    """Start that takes too long, and is not waited for any longer."""

    name: str
    at_s: float


class Hold(Struct, frozen=True):
    """Time for which a pool keeps its maximum size, and the events that it depends on."""

    for_s: float
    has_shrunk: bool = False
    """Whether the pool has stopped workers since it last grew."""
    regrown_s: float = 0.0
    """Time when the pool last had to grow again after it had shrunk."""


class PoolMemory(Struct, frozen=True):
    """State of one pool between two looks."""

    peaks: tuple[Peak, ...] = ()
    """Needs within the time of `hold`, the oldest first, without needs below a later one."""
    demanded_s: float = 0.0
    """Time when the pool last had work."""
    given_up: tuple[GivenUp, ...] = ()
    hold: Hold = Hold(0.0)
    target: int = 0
    """Target of the last decision."""
    num_used: int = 0
    """Part of the budget that the pool used at the last look."""


Memory = Mapping[str, PoolMemory]


def with_want(peaks: tuple[Peak, ...], now_s: float, want: int, keep_s: float) -> tuple[Peak, ...]:
    """Add a need, and remove needs that are older than `keep_s` or smaller."""
    recent = (peak for peak in peaks if peak.at_s > now_s - keep_s)
    return (*takewhile(lambda peak: peak.num_workers > want, recent), Peak(now_s, want))


def with_given_up(
    given_up: tuple[GivenUp, ...], figures: PoolFigures, settings: PoolSettings, now_s: float
) -> tuple[GivenUp, ...]:
    """Add the starts that take too long. A listed start is not given up twice."""
    recent = [g for g in given_up if g.name in figures.starting or now_s < g.at_s + RETRY_S]
    names = {start.name for start in recent}
    late = [
        GivenUp(name, now_s)
        for name, age_s in sorted(figures.starting.items())
        if age_s > settings.start_timeout_s and name not in names
    ]
    return (*recent, *late)


def is_blocked(given_up: tuple[GivenUp, ...], now_s: float) -> bool:
    """Return whether a start was given up within the last RETRY_S, so that none is requested."""
    return any(now_s < start.at_s + RETRY_S for start in given_up)


def with_growth(hold: Hold, now_s: float, idle_s: float) -> Hold:
    """Double the time of `hold` if the pool has shrunk before, because it has shrunk too early.

    Without this, the size of a pool could oscillate under a constant load, if its workers compute
    more or fewer tasks at a time than `per_engine`: each size changes the queue, and the queue
    changes the size.
    """
    if not hold.has_shrunk:
        return hold
    return Hold(min(2 * hold.for_s, MAX_HOLD * idle_s), False, now_s)


def relaxed(hold: Hold, now_s: float, is_silent: bool, idle_s: float) -> Hold:
    """Reset the time of `hold` to `idle_s` after silence, or a long time without new growth."""
    if is_silent or now_s - hold.regrown_s > 2 * MAX_HOLD * idle_s:
        return Hold(idle_s, hold.has_shrunk and not is_silent, now_s)
    return hold
