"""The sentence that explains a decision to an operator. Pure."""

from shared.scaling.memory import RETRY_S, Learned
from shared.scaling.pools import PoolDecision, PoolFigures, PoolSettings, Reason


def explain(
    pool: PoolSettings, figures: PoolFigures, decision: PoolDecision, learned: Learned
) -> str:
    """Return one sentence, such as `2 workers for 20 tasks, at most 16 for each worker`."""
    size = _count(decision.target, "worker")
    if figures.num_others:
        size += f" and {figures.num_others} that others have started"
    if pool.min == pool.max:
        return f"{size}: the size is fixed at {pool.min}"
    tasks = f"for {_count(figures.num_tasks, 'task')}"
    texts: dict[Reason, str] = {
        "demand": f"{tasks}, at most {pool.per_engine} for each worker",
        "tokens": _tokens(pool, figures, learned),
        "oldest": f"{tasks}: the oldest waits for {figures.oldest_s:.1f} s, and ttft_target_s is"
        f" {pool.ttft_target_s:g} s",
        "woken": "for a request that is on its way to this pool",
        "idle": f"{tasks}: the pool keeps the workers that it needed in the last"
        f" {decision.delay_s:.0f} s{_delay(pool, decision, learned)}",
        "pinned": f"{tasks}: {figures.num_pinned} have payloads that others still fetch",
        "min": f"{tasks}: min is {pool.min} {'at this hour' if pool.schedule else ''}".rstrip(),
        "max": f"{tasks}: max is {pool.max}",
        "budget": f"{tasks}: scale.budget leaves no more to this pool",
        "given_up": f"{tasks}: a start took longer than start_timeout_s,"
        f" {pool.start_timeout_s:g} s, and the pool starts none for {RETRY_S:.0f} s",
        "no_figures": "as before: a part of the figures is missing",
    }
    return f"{size} {texts[decision.reason]}"


def _tokens(pool: PoolSettings, figures: PoolFigures, learned: Learned) -> str:
    if figures.work is None or (prompts := figures.work.prompts) is None:
        return ""
    return (
        f"for {prompts.waiting:.0f} waiting prompt tokens and {prompts.arriving:.0f} more each"
        f" second: a worker computes {prompts.speed:.0f} in a second, a start takes"
        f" {learned.cold_start_s:.1f} s, and ttft_target_s is {pool.ttft_target_s:g} s"
    )


def _delay(pool: PoolSettings, decision: PoolDecision, learned: Learned) -> str:
    """Return the origin of the delay, unless it is the configured one."""
    if decision.delay_s == pool.idle_s or not learned.cold_start_s:
        return ""
    start = f", because a start takes {learned.cold_start_s:.1f} s"
    if not learned.gaps_s:
        return start
    return f"{start}, and stopped workers were last needed again after {learned.gaps_s[-1]:.0f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
