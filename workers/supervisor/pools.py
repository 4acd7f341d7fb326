"""Actuator that scales pools of worker processes on this machine."""

from collections.abc import Iterable, Sequence

import structlog

from shared.blobs.server import host_id
from shared.protocol.messages import WorkerSlot
from workers.actuator import Actuator, choose_changes
from workers.pools import Pool
from workers.supervisor.supervisor import Supervisor

_log = structlog.get_logger()


class SupervisedPools(Actuator):
    """Actuator over the processes of a supervisor. The plan uses the supervisor's slot numbers."""

    def __init__(self, supervisor: Supervisor, pools: Iterable[Pool]) -> None:
        self.host = host_id()
        self._supervisor = supervisor
        self._pools = {pool.name: pool for pool in pools}

    def pools(self) -> Sequence[str]:
        return list(self._pools)

    def running(self, pool: str) -> list[WorkerSlot]:
        return self._supervisor.slots(self._pools[pool].spec)

    def wanted(
        self, pool: str, count: int, drain: Sequence[int] = (), give_up: Sequence[int] = ()
    ) -> bool:
        staying = [slot.slot for slot in self.running(pool) if not slot.draining]
        victims, num_new = choose_changes(staying, count, drain, give_up)
        for slot in victims:
            self._supervisor.drain(slot)
        for _ in range(num_new):
            self._supervisor.add(self._pools[pool].spec)
        if victims or num_new:
            _log.info("pool_changed", pool=pool, wanted=count, started=num_new, drained=victims)
        return bool(victims or num_new)
