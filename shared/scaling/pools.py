"""Values of autoscaling: settings of pools, their figures, and decisions. Pure.

A pool is the group of workers of one stage of one model. Times are seconds of a monotonic clock.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.errors import ConfigError
from shared.scaling.schedule import Shift

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
PositiveSeconds = Annotated[float, Meta(gt=0)]

Reason = Literal[
    "demand",
    "tokens",
    "oldest",
    "woken",
    "idle",
    "pinned",
    "min",
    "max",
    "budget",
    "given_up",
    "no_figures",
]


def pool_name(stage: str, model: str | None, pool: str | None = None) -> str:
    """Return the name of a stage's pool. `model` is None for workers that serve all models.

    `pool` is the name of one of several pools, such as `big` in `engine.big/demo`.
    """
    place = stage if pool is None else f"{stage}.{pool}"
    return place if model is None else f"{place}/{model}"


class PoolSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one pool, and conditions for its growth."""

    min: Count = 0
    """Minimum number of workers."""
    max: Positive = 1
    """Maximum number of workers."""
    per_engine: Positive = 16
    """Number of tasks, queued or in flight, for which the pool needs one worker."""
    ttft_target_s: PositiveSeconds = 2.0
    """Target for the time to the first token. The pool grows so that its workers compute the
    waiting prompt tokens within this time, and by a quarter while a task waits for longer."""
    idle_s: Seconds | None = None
    """Least time for which the pool keeps its largest needed size before it shrinks; by default
    60 s, or three times the measured start of a worker if that is longer. The autoscaler extends
    it after intervals between requests that were a little longer."""
    start_timeout_s: Seconds = 300.0
    """Time after which a worker that is not ready is given up."""
    priority: int = 0
    """Pools with a higher priority get workers first if the budget is too small for all."""
    schedule: tuple[Shift, ...] = ()
    """Hours of the week with a higher minimum, in the time zone `scale.timezone`. Workers start as
    much earlier as a start takes, so that they are ready at the first minute."""

    def __post_init__(self) -> None:
        # For a ValueError, msgspec adds the pool's path in the file.
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max, {self.max}")
        if self.largest_min > self.max:
            raise ValueError(f"schedule: min: {self.largest_min} is more than max, {self.max}")

    @property
    def largest_min(self) -> int:
        """Minimum at the busiest hour of the week."""
        return max([self.min, *(shift.min for shift in self.schedule)])


class ScalingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """All pools of a cluster, the edges between them, and their common budget."""

    pools: dict[str, PoolSettings]
    edges: tuple[tuple[str, str], ...] = ()
    """Edges of the pipelines between pools, as pairs of source and target."""
    budget: Count | None = None
    """Limit on the workers of all pools together; None without a limit."""

    def __post_init__(self) -> None:
        num_min = sum(pool.largest_min for pool in self.pools.values())
        if self.budget is not None and num_min > self.budget:
            message = f"budget: {self.budget} is less than the pools' min together, {num_min}"
            raise ConfigError(message, field="budget")
        for edge in self.edges:
            for name in edge:
                if name not in self.pools:
                    raise ConfigError(f"edges: no pool {name!r}", field="edges")


class PromptFigures(Struct, frozen=True):
    """Prompt tokens of a pool's tasks, and the speed of its workers."""

    waiting: float
    """Tokens of the prompts that no worker has computed yet."""
    arriving: float
    """Tokens of the prompts that arrive in a second."""
    speed: float
    """Tokens that one worker computes in a second; more than 0."""


class WorkFigures(Struct, frozen=True):
    """Measured work of a pool's tasks."""

    arriving: float
    """Number of tasks that arrive in a second."""
    task_s: float
    """Mean time of a task in a worker, such as the time of a whole answer; more than 0."""
    num_ended: int = 0
    """Tasks that have ended since the last look. Queues may never have shown them."""
    prompts: PromptFigures | None = None
    """None for workers that compute no prompts, and while their speed is unknown."""


class PoolFigures(Struct, frozen=True):
    """Figures of one pool at one moment, about its queues and its workers."""

    pending: int
    """Number of waiting tasks in both lanes."""
    in_flight: int
    """Number of claimed tasks in both lanes."""
    oldest_s: float
    """Age of the oldest pending task; 0 if there is none."""
    num_running: int
    """Number of the actuator's workers that are ready and do not drain."""
    starting: Mapping[str, float] = {}
    """Workers that are not ready yet, with the seconds since they were requested."""
    num_pinned: int = 0
    """Number of running workers with payloads that other workers have not fetched yet."""
    num_draining: int = 0
    """Number of draining workers, which still use the budget."""
    num_arrived: int = 0
    """Number of requests for the pool's model since the last look."""
    num_others: int = 0
    """Number of ready workers that the actuator has not started. They reduce the need."""
    cold_starts_s: tuple[float, ...] = ()
    """Durations of the starts that have ended since the last look."""
    work: WorkFigures | None = None
    """None before the first task has ended."""

    @property
    def num_tasks(self) -> int:
        """Tasks that are queued or in flight, or have ended since the last look."""
        return self.pending + self.in_flight + (self.work.num_ended if self.work else 0)


class PoolDecision(Struct, frozen=True):
    """Decision on one pool, with its reason."""

    target: int
    """Number of workers that the actuator is to have now, without draining ones."""
    give_up: tuple[str, ...]
    """Starting workers that are not waited for any longer."""
    reason: Reason
    """Rule that has decided `target`."""
    delay_s: float = 0.0
    """Time for which the pool keeps its largest need."""


class WorkerLoad(Struct, frozen=True):
    """Load of one worker, for the choice of workers to drain."""

    name: str
    num_in_flight: int = 0
    num_pinned: int = 0
    is_ready: bool = True


def choose_victims(workers: Iterable[WorkerLoad], count: int) -> list[str]:
    """Choose at most `count` workers to drain: first starting ones, then the least loaded ones.

    A worker with pinned payloads is never chosen, because they would have to be computed again.
    """
    free = [worker for worker in workers if worker.num_pinned == 0]
    free.sort(key=lambda worker: (worker.is_ready, worker.num_in_flight, worker.name))
    return [worker.name for worker in free[: max(0, count)]]


def downstream_of(edges: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the pools that each source of an edge leads to, directly or indirectly."""
    targets: dict[str, set[str]] = {}
    for source, target in edges:
        targets.setdefault(source, set()).add(target)
    downstream: dict[str, set[str]] = {}
    for source in targets:
        todo, reached = [source], set[str]()
        while todo:
            new = targets.get(todo.pop(), set()) - reached
            reached |= new
            todo += new
        downstream[source] = reached
    return downstream
