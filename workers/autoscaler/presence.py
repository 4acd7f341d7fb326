"""Workers of pools, from heartbeats and the reports of actuators. Pure.

A report lists the processes, and the heartbeats show which of them are ready. A worker that was
ready counts as ready as long as its process lives, so a late heartbeat is not a new start. The
last heartbeats of a process that has ended remain readable for some seconds, and are ignored.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from shared.protocol.messages import Heartbeat, PoolReport, WorkerSlot
from shared.scaling.pools import WorkerLoad
from workers.pools import Pool

HELD, PINNED = "held", "arena_pinned"


class Workers(Struct, frozen=True):
    """Workers of one pool at one moment."""

    ready: tuple[WorkerLoad, ...] = ()
    """Ready workers of the actuator that do not drain, by slot."""
    starting: dict[str, float] = {}
    """Workers that are not ready yet: seconds since each was first reported, by slot."""
    num_draining: int = 0
    others: tuple[WorkerLoad, ...] = ()
    """Ready workers that the actuator has not started, and cannot stop."""
    cold_starts_s: tuple[float, ...] = ()
    """Durations of the starts that have ended since the last look."""


class Presence:
    """Keeps which workers of a pool are ready, and since when the others have been starting."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ready: dict[tuple[int, int], WorkerLoad] = {}
        """Last load of each ready worker, by slot and process id."""
        self._started_s: dict[int, float] = {}
        """Time when a slot that is not ready was first reported."""
        self._known: dict[str, tuple[int, int]] = {}
        """Slot and process id of workers with a heartbeat, also after they have ended."""
        self._others: set[str] = set()
        """Workers that the actuator has not started."""

    def look(self, report: PoolReport, beats: Sequence[Heartbeat], now_s: float) -> Workers:
        """Return the pool's workers."""
        slots = report.slots
        self._forget_all_but(slots)
        own = [beat for beat in beats if serves(beat, self._pool)]
        processes = {slot.slot: (slot.slot, slot.pid) for slot in slots}
        living = {None, *processes.values()}
        current = [beat for beat in own if self._known.get(beat.worker) in living]
        certain = _by_process(slots, current, report.host) if report.host else {}
        names = {beat.worker for beat in beats}
        self._known = {worker: p for worker, p in self._known.items() if worker in names}
        self._known |= {beat.worker: processes[slot] for slot, beat in certain.items()}
        matched = list(certain.values())
        rest = [beat for beat in current if beat not in matched]
        if report.host:
            by_slot, others = certain, self._find_others(rest, slots)
        else:
            # Slots of pods are only numbers, so any heartbeat of a pod fits any slot.
            pods = [beat for beat in rest if _is_pod(beat, self._pool)]
            by_slot = _by_number(slots, pods)
            others = tuple(_load(beat.worker, beat) for beat in rest if beat not in pods)
        ready, starting, cold_starts_s = [], {}, []
        for slot in slots:
            if slot.draining:
                continue
            load = self._load_of(slot, by_slot.get(slot.slot))
            if load is None:
                since_s = self._started_s.setdefault(slot.slot, now_s)
                starting[str(slot.slot)] = now_s - since_s
                continue
            ready.append(load)
            if (since_s_or_none := self._started_s.pop(slot.slot, None)) is not None:
                cold_starts_s.append(now_s - since_s_or_none)
        num_draining = sum(slot.draining for slot in slots)
        return Workers(tuple(ready), starting, num_draining, others, tuple(cold_starts_s))

    def _find_others(
        self, beats: Iterable[Heartbeat], slots: Iterable[WorkerSlot]
    ) -> tuple[WorkerLoad, ...]:
        """Return the workers that the actuator has not started, of those without a slot.

        A new worker may be ready before the report contains its process id. So while a slot has no
        process id, an unknown worker is assumed to belong to it.
        """
        may_be_own = any(not slot.pid for slot in slots)
        others = [beat for beat in beats if beat.worker in self._others or not may_be_own]
        self._others |= {beat.worker for beat in others}
        return tuple(_load(beat.worker, beat) for beat in others)

    def _forget_all_but(self, slots: Sequence[WorkerSlot]) -> None:
        """Remove the processes that the actuator no longer reports."""
        processes = {(slot.slot, slot.pid) for slot in slots}
        numbers = {slot.slot for slot in slots}
        self._ready = {key: load for key, load in self._ready.items() if key in processes}
        self._started_s = {n: at_s for n, at_s in self._started_s.items() if n in numbers}

    def _load_of(self, slot: WorkerSlot, beat: Heartbeat | None) -> WorkerLoad | None:
        """Return the load of a ready worker, from its heartbeat or else the last known one."""
        key = slot.slot, slot.pid
        load = None if beat is None else _load(str(slot.slot), beat)
        if load is not None and slot.pid:
            self._ready[key] = load
        return load or self._ready.get(key)


def serves(beat: Heartbeat, pool: Pool) -> bool:
    """Return whether the worker belongs to the pool, by its stage and models."""
    stage = beat.stage or beat.role
    served = (pool.spec.role, pool.stage, pool.spec.pool or "")
    return (beat.role, stage, beat.pool) == served and (
        pool.spec.model is None or pool.spec.model in beat.models
    )


def _is_pod(beat: Heartbeat, pool: Pool) -> bool:
    """Return whether the worker runs in a pod of the pool's Deployment, by the name of the pod."""
    return not beat.hostname or beat.hostname.startswith(f"{pool.deployment}-")


def _by_process(
    slots: Iterable[WorkerSlot], beats: Iterable[Heartbeat], host: str
) -> dict[int, Heartbeat]:
    """Return the heartbeats by slot, of this host alone: other hosts use the same process ids."""
    by_pid = {beat.pid: beat for beat in beats if beat.may_run_on(host)}
    return {slot.slot: by_pid[slot.pid] for slot in slots if slot.pid in by_pid}


def _by_number(slots: Iterable[WorkerSlot], beats: Iterable[Heartbeat]) -> dict[int, Heartbeat]:
    """Return heartbeats by slot, for slots that are only numbers."""
    return dict(zip((slot.slot for slot in slots), beats, strict=False))


def _load(name: str, beat: Heartbeat) -> WorkerLoad:
    return WorkerLoad(name, int(beat.load.get(HELD, 0)), int(beat.load.get(PINNED, 0)))
