"""State of the policy between two looks, as values that it gets and returns. Pure."""

from collections.abc import Mapping
from itertools import takewhile

from msgspec import Struct

from shared.scaling.pools import PoolFigures, PoolSettings

RETRY_S = 60.0
"""A pool asks for no further worker for this time after a start was given up."""
MAX_HOLD = 16
"""A pool that had to grow again after each shrinking is kept large for `idle_s` times this."""


class Peak(Struct, frozen=True):
    """The most workers that were wanted from some moment on."""

    at_s: float
    wanted: int


class GivenUp(Struct, frozen=True):
    """A start that is not waited for any longer."""

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
    """Wants of the time of `hold`, the oldest first; those below a later one are left out."""
    demanded_s: float = 0.0
    """When the pool last had anything to do."""
    given_up: tuple[GivenUp, ...] = ()
    hold: Hold = Hold(0.0)
    wanted: int = 0
    """Number of workers of the last decision."""
    num_used: int = 0
    """The pool's part of the budget at the last look."""


Memory = Mapping[str, PoolMemory]


def with_want(peaks: tuple[Peak, ...], now_s: float, want: int, keep_s: float) -> tuple[Peak, ...]:
    """Add a want, and forget those that are older than `keep_s` or smaller."""
    kept = (peak for peak in peaks if peak.at_s > now_s - keep_s)
    return (*takewhile(lambda peak: peak.wanted > want, kept), Peak(now_s, want))


def with_given_up(
    known: tuple[GivenUp, ...], figures: PoolFigures, settings: PoolSettings, now_s: float
) -> tuple[GivenUp, ...]:
    """Add the starts that take too long. Those that are still listed are not given up twice."""
    kept = [g for g in known if g.name in figures.starting or now_s < g.at_s + RETRY_S]
    names = {given_up.name for given_up in kept}
    late = [
        GivenUp(name, now_s)
        for name, age_s in sorted(figures.starting.items())
        if age_s > settings.start_timeout_s and name not in names
    ]
    return (*kept, *late)


def is_blocked(given_up: tuple[GivenUp, ...], now_s: float) -> bool:
    """Return whether a start was given up so recently that no other is asked for."""
    return any(now_s < one.at_s + RETRY_S for one in given_up)


def with_growth(known: Hold, now_s: float, idle_s: float) -> Hold:
    """Double the time of `known` if the pool had shrunk, because it has shrunk too early.

    Without this, a constant load makes a pool swing whose workers do more or less at a time than
    `per_engine`: each size changes the queue, and the queue the size.
    """
    if not known.has_shrunk:
        return known
    return Hold(min(2 * known.for_s, MAX_HOLD * idle_s), False, now_s)


def relaxed(known: Hold, now_s: float, is_silent: bool, idle_s: float) -> Hold:
    """Return to `idle_s` after silence, or when the pool has long not grown again."""
    if is_silent or now_s - known.regrown_s > 2 * MAX_HOLD * idle_s:
        return Hold(idle_s, known.has_shrunk and not is_silent, now_s)
    return known
