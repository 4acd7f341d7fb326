"""Reads queues and workers of pools. A figure that cannot be read is missing, and never zero."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.figures import QueueDepth
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat, PoolReport
from shared.protocol.subjects import LANES
from shared.scaling.pools import PoolFigures
from shared.state.scale_state import read_report
from workers.autoscaler.presence import Presence, Workers
from workers.pools import Pool, Pools
from workers.roles import role_of

LOOK_TIMEOUT_S = 2.0

_log = structlog.get_logger()


class Queue(Struct, frozen=True):
    """The queue of one stage, model and lane, or the queues of its slots together."""

    pending: int
    in_flight: int
    oldest_s: float


Queues = Mapping[tuple[str, str, str], Queue]


class Look(Struct, frozen=True):
    """State of a cluster at one moment."""

    queues: Queues
    """By stage, model and lane."""
    workers: Mapping[str, Workers]
    """By pool, without the pools that no actuator has reported."""
    actuators: Mapping[str, str]
    """Name of the actuator by pool."""
    beats: Sequence[Heartbeat] = ()


class Reader:
    """Reader of figures, which keeps the workers that were ready."""

    def __init__(self, bus: Bus, worker: str, pools: Pools) -> None:
        self._bus = bus
        self._worker = worker
        self._pools = pools
        self._presences: dict[tuple[str, str], Presence] = {}
        """Presence of workers by actuator and pool, because a new actuator has other workers."""
        self._missing = ""
        """Part of the cluster that the last look did not find; it is logged once."""

    async def look(self) -> Look | None:
        """Return the state of the cluster, or None if a part of it is missing."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                reports = await self._read_reports()
                beats = await self._bus.heartbeats.read()
                queues = await self._read_queues()
        except (Unavailable, TimeoutError) as error:
            self._log_missing(str(error) or "the broker does not answer")
            return None
        # A broker that has restarted has no heartbeats at first, not even the one of this worker.
        if not reports or not any(beat.worker == self._worker for beat in beats):
            self._log_missing(
                "heartbeats are missing" if reports else "no actuator reports workers"
            )
            return None
        self._missing = ""
        actuators = {pool: report.actuator for pool, report in reports.items()}
        return Look(queues, self._workers(reports, beats), actuators, beats)

    def _log_missing(self, reason: str) -> None:
        if reason != self._missing:
            _log.warning("no_figures", reason=reason)
        self._missing = reason

    async def _read_reports(self) -> dict[str, PoolReport]:
        """Return the reports by pool, without the pools that no actuator has reported lately."""
        names = list(self._pools.by_name)
        reports = await asyncio.gather(*(read_report(self._bus, name) for name in names))
        return {name: r for name, r in zip(names, reports, strict=True) if r is not None}

    def _workers(
        self, reports: Mapping[str, PoolReport], beats: Sequence[Heartbeat]
    ) -> dict[str, Workers]:
        now_s = asyncio.get_running_loop().time()
        last, self._presences = self._presences, {}
        workers = {}
        for name, report in reports.items():
            key = report.actuator, name
            presence = self._presences[key] = last.get(key) or Presence(self._pools.by_name[name])
            workers[name] = presence.look(report, beats, now_s)
        return workers

    async def _read_queues(self) -> Queues:
        depths = await self._bus.figures.depths(subjects.STAGES_STREAM)
        read = await asyncio.gather(*map(self._read_queue, depths))
        queues: dict[tuple[str, str, str], Queue] = {}
        for depth, queue in zip(depths, read, strict=True):
            key = subjects.parts_of_stage(depth.subject)
            queues[key] = _sum(queues[key], queue) if key in queues else queue
        return queues

    async def _read_queue(self, depth: QueueDepth) -> Queue:
        oldest_s = 0.0
        if depth.num_pending:
            stream, sequence = subjects.STAGES_STREAM, depth.last_delivered + 1
            if (oldest := await self._bus.read_next(stream, sequence, depth.subject)) is not None:
                oldest_s = max(0.0, self._bus.now_ms() - oldest.stored_ms) / 1000
        return Queue(depth.num_pending, depth.num_in_flight, oldest_s)


def _sum(first: Queue, second: Queue) -> Queue:
    return Queue(
        first.pending + second.pending,
        first.in_flight + second.in_flight,
        max(first.oldest_s, second.oldest_s),
    )


def figures_of(pools: Pools, look: Look, arrivals: Counter[str]) -> dict[str, PoolFigures | None]:
    """Return the figures of each pool; None for one without its workers or any of its queues."""
    before = arrivals + _tasks_before(look.queues, pools.by_name.values())
    figures = {name: _figures_of(pool, look, before) for name, pool in pools.by_name.items()}
    for group in _sharing(pools.by_name.values()):
        num_ahead = 0
        for pool in group:
            whole, capacity = figures[pool.name], pool.settings.max * pool.settings.per_engine
            if whole is not None:
                limit = None if pool is group[-1] else capacity
                figures[pool.name] = _part_of(whole, num_ahead, limit)
            num_ahead += capacity
    return figures


def _sharing(pools: Iterable[Pool]) -> list[list[Pool]]:
    """Return the pools that claim tasks from the same queues, the highest priority first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Pool]] = {}
    for pool in pools:
        groups.setdefault((pool.stage, pool.models), []).append(pool)
    ordered = (sorted(group, key=lambda p: -p.settings.priority) for group in groups.values())
    return [group for group in ordered if len(group) > 1]


def _part_of(whole: PoolFigures, num_ahead: int, limit: int | None) -> PoolFigures:
    """Return the figures of a pool without the tasks that others have room for.

    Pools with a higher priority take `num_ahead` tasks, and this pool at most `limit`.
    """
    num_tasks = max(0, whole.pending + whole.in_flight - num_ahead)
    if limit is not None:
        num_tasks = min(num_tasks, limit)
    in_flight = min(whole.in_flight, num_tasks)
    return replace(
        whole,
        pending=num_tasks - in_flight,
        in_flight=in_flight,
        oldest_s=whole.oldest_s if num_tasks else 0.0,
        num_arrived=0 if num_ahead else whole.num_arrived,
    )


def _tasks_before(queues: Queues, pools: Iterable[Pool]) -> Counter[str]:
    """Return by model the tasks in stages that serve all models, which will reach its pools."""
    stages = {pool.stage for pool in pools if role_of(pool.spec.role).one_model}
    tasks = Counter[str]()
    for (stage, model, _), queue in queues.items():
        if stage not in stages:
            tasks[model] += queue.pending + queue.in_flight
    return tasks


def _figures_of(pool: Pool, look: Look, before: Counter[str]) -> PoolFigures | None:
    keys = [(pool.stage, model, lane) for model in pool.models for lane in LANES]
    if pool.name not in look.workers or any(key not in look.queues for key in keys):
        return None
    queues = [look.queues[key] for key in keys]
    workers = look.workers[pool.name]
    return PoolFigures(
        pending=sum(queue.pending for queue in queues),
        in_flight=sum(queue.in_flight for queue in queues),
        oldest_s=max(queue.oldest_s for queue in queues),
        num_running=len(workers.ready),
        starting=workers.starting,
        num_pinned=sum(worker.num_pinned > 0 for worker in workers.ready),
        num_draining=workers.num_draining,
        num_arrived=sum(before[model] for model in pool.models),
        num_others=len(workers.others),
        cold_starts_s=workers.cold_starts_s,
    )
