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
    """Result of a pool's own rules, before the budget is applied."""

    target: int
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
        pool_figures, pool_memory = figures.get(name), memory.get(name)
        if pool_figures is not None:
            looks[name] = _look_at(pool, pool_figures, pool_memory, name in woken, now_s)
        elif pool_memory is not None:
            looks[name] = _hold(pool, pool_memory, now_s)
    targets = {name: look.target for name, look in looks.items()}
    if settings.budget is not None:
        targets |= _within_budget(settings, settings.budget, looks)
    decisions = {name: _decision(look, targets[name]) for name, look in looks.items()}
    remembered = {
        name: _remember(look.memory, look.num_used, decisions[name]) for name, look in looks.items()
    }
    return decisions, remembered


def _find_woken(settings: ScalingSettings, figures: Figures) -> set[str]:
    """Return the pools that work will reach soon, or with arrived requests for their model."""
    downstream, woken = downstream_of(settings.edges), set[str]()
    for name, pool in figures.items():
        if pool is not None and pool.pending + pool.in_flight + pool.num_arrived > 0:
            woken |= downstream.get(name, set())
            if pool.num_arrived:
                woken.add(name)
    return woken


def _hold(pool: PoolSettings, memory: PoolMemory, now_s: float) -> _Look:
    """Change nothing. Time without figures counts as time with demand."""
    target, num_used = memory.target, memory.num_used
    peaks = with_want(memory.peaks, now_s, target, memory.hold.for_s)
    memory = replace(memory, peaks=peaks, demanded_s=now_s)
    return _Look(target, "no_figures", target, num_used, (), memory, is_held=True)


def _look_at(
    pool: PoolSettings,
    figures: PoolFigures,
    memory: PoolMemory | None,
    is_woken: bool,
    now_s: float,
) -> _Look:
    """Apply the rules of one pool, without the budget."""
    given_up = with_given_up(memory.given_up if memory else (), figures, pool, now_s)
    blocked = is_blocked(given_up, now_s)
    given_up_names = {start.name for start in given_up} & figures.starting.keys()
    num_starting = len(figures.starting) - len(given_up_names)
    num_present = figures.num_running + num_starting
    if memory is None:
        # A new leader has no memory of the last `idle_s`: all present workers may be needed.
        peaks = with_want((), now_s, num_present, pool.idle_s)
        memory = PoolMemory(peaks, now_s, hold=Hold(pool.idle_s, regrown_s=now_s))

    want, reason = _want(
        pool, figures, is_woken, num_present, may_ask=not num_starting and not blocked
    )
    demanded_s = now_s if want else memory.demanded_s
    hold = relaxed(memory.hold, now_s, now_s - demanded_s >= pool.idle_s, pool.idle_s)
    if want > num_present:
        hold = with_growth(hold, now_s, pool.idle_s)
    peaks = with_want(memory.peaks, now_s, want, hold.for_s)
    target = max(want, min(peaks[0].num_workers, num_present))
    if target > want:
        reason = "idle"
    most_now = num_present if blocked else None
    target, reason = _bound(pool, figures.num_pinned, target, reason, most_now)
    memory = PoolMemory(peaks, demanded_s, given_up, hold)
    num_used = figures.num_running + len(figures.starting) + figures.num_draining
    give_up = tuple(sorted(given_up_names))
    return _Look(target, reason, num_present, num_used, give_up, memory, is_blocked=blocked)


def _want(
    pool: PoolSettings, figures: PoolFigures, is_woken: bool, num_present: int, *, may_ask: bool
) -> tuple[int, Reason]:
    """Return the number of workers that the current work needs, up to the pool's max."""
    want = -(-(figures.pending + figures.in_flight) // pool.per_engine)
    reason: Reason = "demand"
    if is_woken and want == 0:
        want, reason = 1, "woken"
    more = num_present + max(1, num_present // 4)
    if figures.pending and figures.oldest_s > pool.oldest_s and may_ask and more > want:
        want, reason = more, "oldest"
    return min(want, pool.max), reason


def _bound(
    pool: PoolSettings, num_pinned: int, target: int, reason: Reason, most_now: int | None
) -> tuple[int, Reason]:
    """Apply the limits of one pool. `most_now` is set while the pool requests no worker."""
    if target < num_pinned:
        target, reason = num_pinned, "pinned"
    if target < pool.min:
        target, reason = pool.min, "min"
    if target > pool.max:
        target, reason = pool.max, "max"
    if most_now is not None and target > most_now:
        # `min` applies again when the pool may start workers.
        target, reason = max(most_now, pool.min), "given_up"
    return target, reason


def _within_budget(
    settings: ScalingSettings, budget: int, looks: Mapping[str, _Look]
) -> dict[str, int]:
    """Divide the budget that pools without figures leave among the others."""
    claims = {
        name: Claim(settings.pools[name], look.target, look.num_present)
        for name, look in looks.items()
        if not look.is_held
    }
    held = [look for look in looks.values() if look.is_held]
    unknown = sum(pool.max for name, pool in settings.pools.items() if name not in looks)
    num_used = sum(look.num_used for look in looks.values())
    left = budget - unknown - sum(look.target for look in held)
    return divide(left, budget - unknown - num_used, claims)


def _decision(look: _Look, target: int) -> PoolDecision:
    reason = look.reason if target == look.target else "budget"
    difference = 0 if look.is_held else target - look.num_present
    start = 0 if look.is_blocked else max(0, difference)
    return PoolDecision(target, start, max(0, -difference), look.give_up, reason)


def _remember(memory: PoolMemory, num_used: int, decision: PoolDecision) -> PoolMemory:
    hold = replace(memory.hold, has_shrunk=True) if decision.stop else memory.hold
    num_used = max(num_used + decision.start, decision.target)
    return replace(memory, hold=hold, target=decision.target, num_used=num_used)
