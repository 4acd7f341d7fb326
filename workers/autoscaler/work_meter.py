"""Measured work of pools, from the counts in heartbeats and the figures of queues. Pure."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from shared.protocol.messages import (
    PROMPT_SPEED,
    PROMPT_TOKENS,
    TASKS,
    TASKS_S,
    Heartbeat,
    rendered_tasks,
    rendered_tokens,
)
from shared.scaling.pools import PoolFigures, PromptFigures, WorkFigures
from workers.autoscaler.presence import serves
from workers.pools import Pool, Pools

RATE_S = 30.0
"""Time in which arriving tasks and tokens are counted."""
KEEP_S = 300.0
"""Time in which the mean time of a task is measured."""

Figures = Mapping[str, PoolFigures | None]
Counts = Mapping[str, float]


class _Sample(Struct, frozen=True):
    """Counts of a pool since the meter began."""

    at_s: float
    num_arrived: float = 0.0
    num_ended: float = 0.0
    ended_s: float = 0.0
    num_rendered: float = 0.0
    num_tokens: float = 0.0


class WorkMeter:
    """Meter of the tasks and prompt tokens of all pools.

    A worker counts from its first heartbeat here, so a worker that was silent is not counted twice.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools.by_name
        self._loads: dict[str, Counts] = {}
        """Last load of each worker."""
        self._samples: dict[str, deque[_Sample]] = {name: deque() for name in self._pools}
        self._task_s: dict[str, float] = {}
        self._speeds: dict[str, float] = {}
        """Last known mean time of a task, and speed of prompts, by pool."""

    def look(
        self, figures: Figures, beats: Sequence[Heartbeat], now_s: float
    ) -> dict[str, PoolFigures | None]:
        """Return the figures with the work of each pool.

        Pools that share their queues have none, because a queue does not show whose tasks arrive.
        """
        increases = {beat.worker: self._increase(beat) for beat in beats}
        self._loads = {beat.worker: beat.load for beat in beats}
        queues = Counter((pool.stage, pool.models) for pool in self._pools.values())
        measured = dict(figures)
        for name, pool in self._pools.items():
            reported = figures[name]
            if reported is not None and queues[pool.stage, pool.models] == 1:
                own = [beat for beat in beats if serves(beat, pool)]
                ended = [increases[beat.worker] for beat in own]
                self._add_sample(pool, reported, ended, [*increases.values()], now_s)
                measured[name] = replace(reported, work=self._work(pool, reported, own, now_s))
        return measured

    def _increase(self, beat: Heartbeat) -> Counts:
        last = self._loads.get(beat.worker, beat.load)
        return {key: value - last.get(key, 0.0) for key, value in beat.load.items()}

    def _add_sample(
        self,
        pool: Pool,
        reported: PoolFigures,
        ended: Sequence[Counts],
        rendered: Sequence[Counts],
        now_s: float,
    ) -> None:
        """Add the increases of the counts: of tasks by the pool's workers, of prompts by all."""
        samples = self._samples[pool.name]
        last = samples[-1] if samples else _Sample(now_s)
        num_ended = last.num_ended + _total(ended, TASKS)
        samples.append(
            _Sample(
                now_s,
                num_ended + reported.pending + reported.in_flight,
                num_ended,
                last.ended_s + _total(ended, TASKS_S),
                last.num_rendered + _total(rendered, *map(rendered_tasks, pool.models)),
                last.num_tokens + _total(rendered, *map(rendered_tokens, pool.models)),
            )
        )
        while samples[0].at_s < now_s - KEEP_S:
            samples.popleft()

    def _work(
        self, pool: Pool, reported: PoolFigures, own: Sequence[Heartbeat], now_s: float
    ) -> WorkFigures | None:
        samples = self._samples[pool.name]
        first, last = samples[0], samples[-1]
        if last.num_ended > first.num_ended:
            ended_s = last.ended_s - first.ended_s
            self._task_s[pool.name] = ended_s / (last.num_ended - first.num_ended)
        if speeds := [speed for beat in own if (speed := beat.load.get(PROMPT_SPEED))]:
            self._speeds[pool.name] = sum(speeds) / len(speeds)
        if not (task_s := self._task_s.get(pool.name)):
            return None
        start = next(sample for sample in samples if sample.at_s >= now_s - RATE_S)
        # Workers that died may not have reported their last tasks.
        arriving = max(0.0, last.num_arrived - start.num_arrived) / RATE_S
        before = samples[-2] if len(samples) > 1 else last
        num_ended = round(last.num_ended - before.num_ended)
        prompts = None
        if speed := self._speeds.get(pool.name):
            claimed = sum(beat.load.get(PROMPT_TOKENS, 0.0) for beat in own)
            prompts = PromptFigures(
                claimed + _tokens_of_last(samples, reported.pending),
                (last.num_tokens - start.num_tokens) / RATE_S,
                speed,
            )
        return WorkFigures(arriving, task_s, num_ended, prompts)


def _total(counts: Sequence[Counts], *keys: str) -> float:
    return sum(count.get(key, 0.0) for count in counts for key in keys)


def _tokens_of_last(samples: Sequence[_Sample], num_tasks: int) -> float:
    """Return the prompt tokens of the last `num_tasks` rendered tasks, which wait in the queue."""
    last = samples[-1]
    since = (s for s in reversed(samples) if last.num_rendered - s.num_rendered >= num_tasks)
    start = next(since, samples[0])
    num_rendered = last.num_rendered - start.num_rendered
    return (last.num_tokens - start.num_tokens) * num_tasks / max(1.0, num_rendered)
