"""Autoscaling policy: computes target sizes with their reasons from the figures of all pools. Pure.

The rules of one pool, in order:

1. Without figures nothing changes. A figure of zero is a figure.
2. The pool needs workers for the work that arrives and waits, by measured times and speeds; until
   there are any, a worker for each `per_engine` tasks that wait or are in flight. It needs at least
   one while a pool upstream has work, so that a cold start begins with the request.
3. It needs a quarter more if the oldest task waits for longer than `ttft_target_s` and nothing
   starts.
4. `min` and `max` limit the need. Workers that others have started reduce it.
5. The pool keeps the size of its last plan, within its largest need in the last `delay_of`, also if
   reports show fewer workers. It keeps workers with payloads that others still fetch.
6. A start counts as a worker until `start_timeout_s`. Then it is given up, and the pool starts no
   worker for RETRY_S, not even for its `min`.
7. The budget limits the result.
"""

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from shared.scaling.budget import Claim, divide
from shared.scaling.memory import (
    Delay,
    Memory,
    PoolMemory,
    delay_of,
    is_blocked,
    with_given_up,
    with_growth,
    with_starts,
    with_want,
)
from shared.scaling.pools import (
    PoolDecision,
    PoolFigures,
    PoolSettings,
    Reason,
    ScalingSettings,
    WorkFigures,
    downstream_of,
)

BUSY = 0.8
"""Part of the workers' time that the work which arrives may take."""

Figures = Mapping[str, PoolFigures | None]


class _Look(Struct, frozen=True):
    """Result of a pool's own rules, before the budget is applied."""

    target: int
    reason: Reason
    num_present: int
    """Workers that are reported, or planned and not reported yet."""
    num_used: int
    delay_s: float
    give_up: tuple[str, ...]
    memory: PoolMemory
    is_held: bool = False


def decide(
    settings: ScalingSettings, figures: Figures, memory: Memory, now_s: float
) -> tuple[dict[str, PoolDecision], dict[str, PoolMemory]]:
    """Decide the size of each pool. Return the decisions, and the memory for the next look.

    A pool that has never had figures has no decision, and its max of the budget is reserved.
    """
    woken = _find_woken(settings, figures)
    looks: dict[str, _Look] = {}
    remembered = {name: memory[name] for name in settings.pools if name in memory}
    for name, pool in settings.pools.items():
        pool_figures, pool_memory = figures.get(name), memory.get(name, PoolMemory())
        if pool_figures is not None:
            looks[name] = _look_at(pool, pool_figures, pool_memory, name in woken, now_s)
        elif pool_memory.target is not None:
            looks[name] = _hold(pool, pool_memory, pool_memory.target, now_s)
    targets = {name: look.target for name, look in looks.items()}
    if settings.budget is not None:
        targets |= _within_budget(settings, settings.budget, looks)
    for name, look in looks.items():
        remembered[name] = _remember(look, targets[name])
    return {name: _decision(look, targets[name]) for name, look in looks.items()}, remembered


def _find_woken(settings: ScalingSettings, figures: Figures) -> set[str]:
    """Return the pools that work will reach soon, or with arrived requests for their model."""
    downstream, woken = downstream_of(settings.edges), set[str]()
    for name, pool in figures.items():
        if pool is not None and pool.pending + pool.in_flight + pool.num_arrived > 0:
            woken |= downstream.get(name, set())
            if pool.num_arrived:
                woken.add(name)
    return woken


def _hold(pool: PoolSettings, memory: PoolMemory, target: int, now_s: float) -> _Look:
    """Change nothing. Time without figures counts as time with demand."""
    delay = delay_of(pool, memory.learned)
    peaks = with_want(memory.peaks, now_s, target, delay.longest_s)
    memory = replace(memory, peaks=peaks)
    return _Look(
        target, "no_figures", target, memory.num_used, delay.for_s, (), memory, is_held=True
    )


def _look_at(
    pool: PoolSettings, figures: PoolFigures, memory: PoolMemory, is_woken: bool, now_s: float
) -> _Look:
    """Apply the rules of one pool, without the budget."""
    given_up = with_given_up(memory.given_up, figures, pool, now_s)
    given_up_names = {start.name for start in given_up} & figures.starting.keys()
    num_seen = figures.num_running + len(figures.starting) - len(given_up_names)
    # A new leader has no memory of the last needs: all workers that it finds may be needed.
    last = num_seen if memory.target is None else memory.target
    memory = replace(
        memory, target=last, learned=with_starts(memory.learned, figures), given_up=given_up
    )
    want, reason = _want(pool, figures, memory, is_woken, now_s)
    target, reason, delay, memory = _keep(pool, memory, last, want, reason, now_s)
    if target < (num_pinned := min(figures.num_pinned, last)):
        target, reason = num_pinned, "pinned"
    if target > pool.max:
        target, reason = pool.max, "max"
    if target > num_seen and is_blocked(given_up, now_s):
        target, reason = num_seen, "given_up"
    num_used = figures.num_running + len(figures.starting) + figures.num_draining
    return _Look(
        target,
        reason,
        max(num_seen, last),
        max(num_used, last),
        delay.for_s,
        tuple(sorted(given_up_names)),
        memory,
    )


def _keep(
    pool: PoolSettings, memory: PoolMemory, last: int, want: int, reason: Reason, now_s: float
) -> tuple[int, Reason, Delay, PoolMemory]:
    """Keep the workers of the last plan that were needed within the delay, and learn the delay."""
    delay = delay_of(pool, memory.learned)
    peaks = memory.peaks or with_want((), now_s, last, delay.longest_s)
    if want > last and 4 * want >= 5 * last:
        # Otherwise, the present workers do most of the work until the new ones are ready.
        learned = with_growth(memory, now_s, want, delay.longest_s)
        memory = replace(memory, learned=learned, has_shrunk=False)
    peaks = with_want(peaks, now_s, want, delay.longest_s)
    needed = next(
        peak.num_workers for peak in peaks if peak.at_s > now_s - delay.for_s or peak is peaks[-1]
    )
    target = max(want, min(needed, last))
    return target, "idle" if target > want else reason, delay, replace(memory, peaks=peaks)


def _want(
    pool: PoolSettings, figures: PoolFigures, memory: PoolMemory, is_woken: bool, now_s: float
) -> tuple[int, Reason]:
    """Return the number of the actuator's workers that the current work needs."""
    want = -(-(figures.pending + figures.in_flight) // pool.per_engine)
    reason: Reason = "demand"
    if figures.work is not None:
        cold_s = memory.learned.cold_start_s
        need, reason = _for_work(pool, figures, figures.work, cold_s)
        # Tasks in flight have their places, and several workers cannot share one task.
        least = max(-(-figures.in_flight // pool.per_engine), min(1, figures.num_tasks))
        want = max(least, min(math.ceil(need), figures.num_tasks))
    if is_woken and want == 0:
        want, reason = 1, "woken"
    last = memory.target or 0
    # Workers that are planned and not ready yet may be enough.
    may_ask = figures.num_running >= last and not figures.starting
    num_present = last + figures.num_others
    more = num_present + max(1, num_present // 4)
    is_late = figures.pending > 0 and figures.oldest_s > pool.ttft_target_s
    if is_late and may_ask and more > want and not is_blocked(memory.given_up, now_s):
        want, reason = more, "oldest"
    if want < pool.min:
        want, reason = pool.min, "min"
    if want > pool.max:
        want, reason = pool.max, "max"
    return max(0, want - figures.num_others), reason


def _for_work(
    pool: PoolSettings, figures: PoolFigures, work: WorkFigures, cold_s: float
) -> tuple[float, Reason]:
    """Return the number of workers for the work that arrives, and the work that waits.

    Work is measured in seconds of a worker. A worker has `per_engine` places for tasks, and a speed
    for prompts; the larger share counts. A worker that is requested now is ready after
    `cold_s`. The work that still waits then is to begin within `ttft_target_s`.
    """
    num_ready = figures.num_running + figures.num_others

    def need(arriving: float, waiting_s: float, within_s: float) -> float:
        left_s = waiting_s + (arriving - num_ready) * cold_s
        return arriving / BUSY + max(0.0, left_s) / within_s

    place_s = work.task_s / pool.per_engine
    # A task keeps its place for its whole time, so no place serves two tasks within it.
    within_s = max(pool.ttft_target_s, work.task_s)
    places = need(work.arriving * place_s, figures.pending * place_s, within_s)
    if (prompts := work.prompts) is None:
        return places, "demand"
    arriving = prompts.arriving / prompts.speed
    tokens = need(arriving, prompts.waiting / prompts.speed, pool.ttft_target_s)
    return (tokens, "tokens") if tokens > places else (places, "demand")


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
    grants = divide(left, budget - unknown - num_used, claims)
    # A pool needs less than its min after a start was given up, or with workers of others.
    return {name: min(grant, claims[name].target) for name, grant in grants.items()}


def _decision(look: _Look, target: int) -> PoolDecision:
    reason = look.reason if target == look.target else "budget"
    return PoolDecision(target, look.give_up, reason, look.delay_s)


def _remember(look: _Look, target: int) -> PoolMemory:
    memory = look.memory
    has_shrunk = memory.has_shrunk or target < (memory.target or 0)
    num_used = max(look.num_used, target)
    return replace(memory, target=target, has_shrunk=has_shrunk, num_used=num_used)
