"""State of the policy between two looks, and the delay that it learns. Pure."""

from collections.abc import Mapping
from itertools import takewhile

from msgspec import Struct

from shared.scaling.pools import PoolFigures, PoolSettings

RETRY_S = 60.0
"""Time after a given up start in which a pool requests no further worker."""
IDLE_S = 60.0
"""Least default of `idle_s`."""
STARTS_PER_IDLE = 3
"""Default of `idle_s`, in measured starts, if that is longer."""
START_PRICE = 8.0
"""Price of a start in idle time, in multiples of its duration: clients wait for a start."""
IDLE_PRICE = 2.0
"""Least price of a start, in multiples of `idle_s`."""
MARGIN = 1.25
"""Learned delay, in multiples of the interval that it bridges."""
NUM_GAPS = 16
"""Number of intervals from which the delay is learned."""
NEWEST_START = 0.5
"""Weight of the newest start in the measured time of a start."""


class Peak(Struct, frozen=True):
    """Maximum need for workers since some moment."""

    at_s: float
    num_workers: int


class GivenUp(Struct, frozen=True):
    """Start that takes too long, and is not waited for any longer."""

    name: str
    at_s: float


class Learned(Struct, frozen=True, omit_defaults=True):
    """Measurements of a pool that outlive a leader."""

    cold_start_s: float = 0.0
    """Time of a start; 0 before the first one."""
    gaps_s: tuple[float, ...] = ()
    """Last intervals after which the pool had to grow by a quarter, since it last needed that
    size."""


class PoolMemory(Struct, frozen=True):
    """State of one pool between two looks."""

    target: int | None = None
    """Target of the last decision, which reports may not show yet; None before the first look."""
    peaks: tuple[Peak, ...] = ()
    """Needs in the longest time that a delay may bridge, without needs below a later one."""
    has_shrunk: bool = False
    """Whether the target has fallen since the last interval was learned."""
    learned: Learned = Learned()
    given_up: tuple[GivenUp, ...] = ()
    num_used: int = 0
    """Part of the budget that the pool used at the last look."""


Memory = Mapping[str, PoolMemory]


class Delay(Struct, frozen=True):
    """Time for which a pool keeps its largest need, and the longest time that it may learn."""

    for_s: float
    longest_s: float


def delay_of(pool: PoolSettings, learned: Learned) -> Delay:
    """Return the delay that would have cost least for the last intervals, and at least `idle_s`.

    During an interval, a kept worker costs its time. A worker that was stopped too early costs the
    time until then and the price of a start.
    """
    least_s = pool.idle_s
    if least_s is None:
        least_s = max(IDLE_S, STARTS_PER_IDLE * learned.cold_start_s)
    price_s = max(START_PRICE * learned.cold_start_s, IDLE_PRICE * least_s)
    delays_s = sorted(max(least_s, MARGIN * gap) for gap in learned.gaps_s)

    def cost_s(delay_s: float) -> float:
        return sum(gap if gap <= delay_s else delay_s + price_s for gap in learned.gaps_s)

    return Delay(min([least_s, *delays_s], key=cost_s), MARGIN * (least_s + price_s))


def with_starts(learned: Learned, figures: PoolFigures) -> Learned:
    """Add the starts that have ended to the measured time of a start."""
    cold_s = learned.cold_start_s
    for start_s in figures.cold_starts_s:
        cold_s += (start_s - cold_s) * (NEWEST_START if cold_s else 1.0)
    return Learned(cold_s, learned.gaps_s)


def with_growth(memory: PoolMemory, now_s: float, want: int, longest_s: float) -> Learned:
    """Return the measurements with the time since the pool last needed `want` workers.

    They are unchanged if it has not shrunk since it last had to grow.
    """
    learned = memory.learned
    if not memory.has_shrunk:
        return learned
    times_s = [peak.at_s for peak in memory.peaks if peak.num_workers >= want]
    gap_s = min(now_s - times_s[-1], longest_s) if times_s else longest_s
    return Learned(learned.cold_start_s, (*learned.gaps_s, gap_s)[-NUM_GAPS:])


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
