"""The actuator for Kubernetes: pools are Deployments, whose pods the API server starts and stops.

Which pod goes when a pool shrinks is the cluster's choice: it drains, as any other.
"""

from collections.abc import Sequence

import structlog

from shared.protocol.messages import WorkerSlot
from workers.autoscaler.kubernetes_api import Scale, ScaleApi
from workers.autoscaler.remote_pools import RemotePools
from workers.deployment_names import name_of
from workers.pools import Pools

_log = structlog.get_logger()


class KubernetesPools(RemotePools):
    """Actuator over Deployments; its slots only count workers."""

    def __init__(self, api: ScaleApi, pools: Pools) -> None:
        super().__init__(pools)
        self._api = api
        self._names = {name: name_of(pool.spec) for name, pool in pools.by_name.items()}
        self._scales: dict[str, Scale] = {}
        self._wanted: dict[str, int] = {}
        """Sizes to set at the next look, and then no more: later ones may be another's."""

    def running(self, pool: str) -> list[WorkerSlot]:
        self._check_known(pool)
        scale, first = self._scales[pool], self._first_slots[pool]
        present = max(scale.present, scale.wanted)
        return [WorkerSlot(first + n, draining=n >= scale.wanted) for n in range(present)]

    def wanted(
        self, pool: str, count: int, drain: Sequence[int] = (), give_up: Sequence[int] = ()
    ) -> bool:
        del drain, give_up  # Deployments have a size, and no choice of pods.
        if self._wanted.get(pool, self._scales[pool].wanted) == count:
            return False
        self._wanted[pool] = count
        self.ask()
        return True

    async def _read(self, pool: str) -> None:
        self._scales[pool] = await self._api.get(self._names[pool])

    async def _change(self, pool: str) -> None:
        name, seen = self._names[pool], self._scales[pool]
        count = self._wanted.pop(pool, seen.wanted)
        if count != seen.wanted:
            # None: it has changed meanwhile, and is read again.
            changed = await self._api.set(name, seen, count)
            _log.info("pool_changed", pool=pool, deployment=name, wanted=count)
            self._scales[pool] = changed or seen
