"""Autoscaling policy: computes target sizes with their reasons from the figures of all pools. Pure.

The rules of one pool, in order:

1. Without figures nothing changes. A figure of zero is a figure.
2. The pool needs a worker for each `per_engine` tasks that wait or are in flight, and at least one
   while a pool upstream has work, so that a cold start begins with the request.
3. It needs a quarter more if the oldest task waits for longer than `oldest_s` and nothing starts.
4. It shrinks to its maximum need in the last `idle_s`, and keeps workers with payloads that others
   still fetch. If it then has to grow again, it keeps its workers twice as long, up to MAX_HOLD
   times. Without any demand for `idle_s`, it still shrinks to `min`.
5. A start counts as a worker until `start_timeout_s`. Then it is given up, and the pool starts no
   worker for RETRY_S, not even for its `min`.
6. `min`, `max` and the budget limit the result.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from shared.scaling.budget import Claim, divide
from shared.scaling.memory import (
    Hold,
    Memory,
    PoolMemory,
    is_blocked,
    relaxed,
    with_given_up,
    with_growth,
    with_want,
)
from shared.scaling.pools import (
    PoolDecision,
    PoolFigures,
    PoolSettings,
    Reason,
    ScalingSettings,
    downstream_of,
)

Figures = Mapping[str, PoolFigures | None]


class _Look(Struct, frozen=True):
    """One pool between its own rules and the budget."""

    wanted: int
    reason: Reason
    num_present: int
    num_used: int
    give_up: tuple[str, ...]
    memory: PoolMemory
    is_blocked: bool = False
    is_held: bool = False


def decide(
    settings: ScalingSettings, figures: Figures, memory: Memory, now_s: float
) -> tuple[dict[str, PoolDecision], dict[str, PoolMemory]]:
    """Decide the size of each pool. Return the decisions, and the memory for the next look.

    A pool that has never had figures has no decision, and its max of the budget is reserved.
    """
    woken = _find_woken(settings, figures)
    looks: dict[str, _Look] = {}
    for name, pool in settings.pools.items():
        seen, known = figures.get(name), memory.get(name)
        if seen is not None:
            looks[name] = _look_at(pool, seen, known, name in woken, now_s)
        elif known is not None:
            looks[name] = _hold(pool, known, now_s)
    wanted = {name: look.wanted for name, look in looks.items()}
    if settings.budget is not None:
        wanted |= _within_budget(settings, settings.budget, looks)
    decisions = {name: _decision(look, wanted[name]) for name, look in looks.items()}
    remembered = {
        name: _remember(look.memory, look.num_used, decisions[name]) for name, look in looks.items()
    }
    return decisions, remembered


def _find_woken(settings: ScalingSettings, figures: Figures) -> set[str]:
    """Return the pools to which work is on its way, or whose model was asked for."""
    downstream, woken = downstream_of(settings.edges), set[str]()
    for name, seen in figures.items():
        if seen is not None and seen.pending + seen.in_flight + seen.num_heard > 0:
            woken |= downstream.get(name, set())
            if seen.num_heard:
                woken.add(name)
    return woken


def _hold(pool: PoolSettings, known: PoolMemory, now_s: float) -> _Look:
    """Change nothing. The time without figures is no time without demand."""
    peaks = with_want(known.peaks, now_s, known.wanted, known.hold.for_s)
    memory = replace(known, peaks=peaks, demanded_s=now_s)
    return _Look(known.wanted, "no_figures", known.wanted, known.num_used, (), memory, is_held=True)


def _look_at(
    pool: PoolSettings, seen: PoolFigures, known: PoolMemory | None, is_woken: bool, now_s: float
) -> _Look:
    """Apply the rules of one pool, all but the budget."""
    given_up = with_given_up(known.given_up if known else (), seen, pool, now_s)
    blocked = is_blocked(given_up, now_s)
    given_up_names = {one.name for one in given_up} & seen.starting.keys()
    num_starting = len(seen.starting) - len(given_up_names)
    num_present = seen.num_running + num_starting
    if known is None:
        # A new leader knows nothing of the last `idle_s`: what is there may have been wanted.
        peaks = with_want((), now_s, num_present, pool.idle_s)
        known = PoolMemory(peaks, now_s, hold=Hold(pool.idle_s, regrown_s=now_s))

    want, reason = _want(
        pool, seen, is_woken, num_present, may_ask=not num_starting and not blocked
    )
    demanded_s = now_s if want else known.demanded_s
    hold = relaxed(known.hold, now_s, now_s - demanded_s >= pool.idle_s, pool.idle_s)
    if want > num_present:
        hold = with_growth(hold, now_s, pool.idle_s)
    peaks = with_want(known.peaks, now_s, want, hold.for_s)
    wanted = max(want, min(peaks[0].wanted, num_present))
    if wanted > want:
        reason = "idle"
    wanted, reason = _bound(pool, seen.num_pinned, wanted, reason, num_present if blocked else None)
    memory = PoolMemory(peaks, demanded_s, given_up, hold)
    num_used = seen.num_running + len(seen.starting) + seen.num_draining
    give_up = tuple(sorted(given_up_names))
    return _Look(wanted, reason, num_present, num_used, give_up, memory, is_blocked=blocked)


def _want(
    pool: PoolSettings, seen: PoolFigures, is_woken: bool, num_present: int, *, may_ask: bool
) -> tuple[int, Reason]:
    """Return the workers that the work of this moment needs, up to the pool's max."""
    want = -(-(seen.pending + seen.in_flight) // pool.per_engine)
    reason: Reason = "demand"
    if is_woken and want == 0:
        want, reason = 1, "woken"
    more = num_present + max(1, num_present // 4)
    if seen.pending and seen.oldest_s > pool.oldest_s and may_ask and more > want:
        want, reason = more, "oldest"
    return min(want, pool.max), reason


def _bound(
    pool: PoolSettings, num_pinned: int, wanted: int, reason: Reason, most_now: int | None
) -> tuple[int, Reason]:
    """Apply the limits of one pool. `most_now` is set while the pool asks for no worker."""
    if wanted < num_pinned:
        wanted, reason = num_pinned, "pinned"
    if wanted < pool.min:
        wanted, reason = pool.min, "min"
    if wanted > pool.max:
        wanted, reason = pool.max, "max"
    if most_now is not None and wanted > most_now:
        # `min` holds again when the pool may start workers.
        wanted, reason = max(most_now, pool.min), "given_up"
    return wanted, reason


def _within_budget(
    settings: ScalingSettings, budget: int, looks: Mapping[str, _Look]
) -> dict[str, int]:
    """Divide what pools without figures leave of the budget over the others."""
    claims = {
        name: Claim(settings.pools[name], look.wanted, look.num_present)
        for name, look in looks.items()
        if not look.is_held
    }
    held = [look for look in looks.values() if look.is_held]
    unknown = sum(pool.max for name, pool in settings.pools.items() if name not in looks)
    num_used = sum(look.num_used for look in looks.values())
    left = budget - unknown - sum(look.wanted for look in held)
    return divide(left, budget - unknown - num_used, claims)


def _decision(look: _Look, wanted: int) -> PoolDecision:
    reason = look.reason if wanted == look.wanted else "budget"
    difference = 0 if look.is_held else wanted - look.num_present
    start = 0 if look.is_blocked else max(0, difference)
    return PoolDecision(wanted, start, max(0, -difference), look.give_up, reason)


def _remember(memory: PoolMemory, num_used: int, decision: PoolDecision) -> PoolMemory:
    hold = replace(memory.hold, has_shrunk=True) if decision.stop else memory.hold
    num_used = max(num_used + decision.start, decision.wanted)
    return replace(memory, hold=hold, wanted=decision.wanted, num_used=num_used)
