"""The workers of pools, as heartbeats and the actuator's report show them together. Pure.

The report says which processes there are, the heartbeats which of them are ready. A worker that was
ready counts as ready as long as its process lives: a late heartbeat is no new start.
"""

from collections.abc import Iterable

from msgspec import Struct

from shared.protocol.messages import ActuatorReport, Heartbeat, WorkerSlot
from shared.scaling.pools import WorkerLoad
from workers.pools import Pool

HELD, PINNED = "held", "arena_pinned"


class Workers(Struct, frozen=True):
    """The workers of one pool at one moment."""

    ready: tuple[WorkerLoad, ...] = ()
    """Those of the actuator, by slot, that do not drain."""
    starting: dict[str, float] = {}
    """Those that are not ready yet, by slot, and for how long they have been known."""
    num_draining: int = 0
    others: tuple[WorkerLoad, ...] = ()
    """Ready workers that the actuator has not started, and cannot stop."""
    cold_starts_s: tuple[float, ...] = ()
    """Times of the starts that have ended since the last look."""


class Presence:
    """Memory of which worker is ready, and since when the others start."""

    def __init__(self) -> None:
        self._ready: dict[tuple[int, int], WorkerLoad] = {}
        """By slot and process id."""
        self._started_s: dict[int, float] = {}
        """When a slot that is not ready was first seen."""
        self._own_pids: set[int] = set()
        """All processes that the actuator has had. Heartbeats of dead ones stay for seconds."""
        self._others: set[str] = set()
        """Workers that the actuator has not started."""

    def look(
        self, pool: Pool, report: ActuatorReport, beats: Iterable[Heartbeat], now_s: float
    ) -> Workers:
        """Return the pool's workers."""
        slots = report.pools.get(pool.name, [])
        own = [beat for beat in beats if _serves(beat, pool)]
        if report.host:
            by_pid = {beat.pid: beat for beat in own if _is_on(beat, report.host)}
            by_slot = {slot.slot: by_pid.get(slot.pid) for slot in slots}
            others = self._find_others(own, slots, report.host)
        else:
            # The actuator knows no processes: its slots are a number of workers.
            by_slot = dict(zip((slot.slot for slot in slots), own, strict=False))
            others = ()
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
        self, beats: list[Heartbeat], slots: list[WorkerSlot], host: str
    ) -> tuple[WorkerLoad, ...]:
        """Return the workers that the actuator has not started.

        A new worker may be ready before the report has its process id. While any slot has none, a
        worker that was not known before is taken for that slot's.
        """
        self._own_pids |= {slot.pid for slot in slots if slot.pid}
        may_be_own = any(not slot.pid for slot in slots)
        others = [
            beat
            for beat in beats
            if not (_is_on(beat, host) and beat.pid in self._own_pids)
            and (beat.worker in self._others or not may_be_own)
        ]
        self._others |= {beat.worker for beat in others}
        return tuple(_load(beat.worker, beat) for beat in others)

    def forget_all_but(self, report: ActuatorReport) -> None:
        """Forget the processes that the actuator does not have any more."""
        slots = [slot for pool in report.pools.values() for slot in pool]
        processes = {(slot.slot, slot.pid) for slot in slots}
        numbers = {slot.slot for slot in slots}
        self._ready = {key: load for key, load in self._ready.items() if key in processes}
        self._started_s = {n: at_s for n, at_s in self._started_s.items() if n in numbers}

    def _load_of(self, slot: WorkerSlot, beat: Heartbeat | None) -> WorkerLoad | None:
        """Return the load of a ready worker, the last one known without a heartbeat."""
        key = slot.slot, slot.pid
        load = None if beat is None else _load(str(slot.slot), beat)
        if load is not None and slot.pid:
            self._ready[key] = load
        return load or self._ready.get(key)


def _serves(beat: Heartbeat, pool: Pool) -> bool:
    stage = beat.stage or beat.role
    return (beat.role, stage) == (pool.spec.role, pool.stage) and (
        pool.spec.model is None or pool.spec.model in beat.models
    )


def _is_on(beat: Heartbeat, host: str) -> bool:
    """Return whether a worker may run on this machine. Machines use the same process ids."""
    return beat.blobs is None or beat.blobs.host == host


def _load(name: str, beat: Heartbeat) -> WorkerLoad:
    return WorkerLoad(name, int(beat.load.get(HELD, 0)), int(beat.load.get(PINNED, 0)))
