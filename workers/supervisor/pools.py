"""The local actuator: pools whose workers are processes of `pagemill up`."""

from collections.abc import Sequence

import structlog

from shared.blobs.server import host_id
from shared.protocol.messages import WorkerSlot
from workers.actuator import choose_changes
from workers.pools import Pools
from workers.supervisor.cluster import LocalCluster

_log = structlog.get_logger()


class LocalPools:
    """Actuator over the processes of a local cluster; slots are the cluster's worker numbers."""

    def __init__(self, cluster: LocalCluster, pools: Pools) -> None:
        self.host = host_id()
        self._cluster = cluster
        self._pools = pools.by_name

    def pools(self) -> Sequence[str]:
        return list(self._pools)

    def running(self, pool: str) -> list[WorkerSlot]:
        return self._cluster.slots(self._pools[pool].spec)

    def wanted(
        self, pool: str, count: int, drain: Sequence[int] = (), give_up: Sequence[int] = ()
    ) -> bool:
        staying = [slot.slot for slot in self.running(pool) if not slot.draining]
        victims, num_new = choose_changes(staying, count, drain, give_up)
        for slot in victims:
            self._cluster.drain_worker(slot)
        for _ in range(num_new):
            self._cluster.add_worker(self._pools[pool].spec)
        if victims or num_new:
            _log.info("pool_changed", pool=pool, wanted=count, started=num_new, drained=victims)
        return bool(victims or num_new)
