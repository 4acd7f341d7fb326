"""The actuator for Kubernetes: pools are Deployments, whose pods the API server starts and stops.

Which pod goes when a pool shrinks is the cluster's choice: it drains, as any other.
"""

import asyncio
from collections.abc import Sequence

import structlog

from shared.errors import PagemillError, Unavailable
from shared.protocol.messages import WorkerSlot
from shared.state.scale_state import REPORT_AGE_S
from workers.actuator import REPORT_S
from workers.autoscaler.kubernetes_api import Scale, ScaleApi
from workers.deployment_names import name_of
from workers.pools import Pools

# Slots of a pool are numbered from a multiple of this.
MAX_SLOTS = 10_000

_log = structlog.get_logger()


class KubernetesPools:
    """Actuator over Deployments; its slots only count workers."""

    host = ""

    def __init__(self, api: ScaleApi, pools: Pools) -> None:
        self._api = api
        self._names = {name: name_of(pool.spec) for name, pool in pools.by_name.items()}
        self._scales: dict[str, Scale] = {}
        self._wanted: dict[str, int] = {}
        self._seen_s = -REPORT_AGE_S
        self._asked = asyncio.Event()

    def pools(self) -> Sequence[str]:
        return list(self._names)

    def running(self, pool: str) -> list[WorkerSlot]:
        if _now_s() - self._seen_s > REPORT_AGE_S:
            raise Unavailable("the API server has not told the sizes of the pools")
        scale, first = self._scales[pool], self.pools().index(pool) * MAX_SLOTS
        present = max(scale.present, scale.wanted)
        return [WorkerSlot(first + n, draining=n >= scale.wanted) for n in range(present)]

    def wanted(
        self, pool: str, count: int, drain: Sequence[int] = (), give_up: Sequence[int] = ()
    ) -> bool:
        del drain, give_up  # Deployments have a size, and no choice of pods.
        if self._wanted.get(pool, self._scales[pool].wanted) == count:
            return False
        self._wanted[pool] = count
        self._asked.set()
        return True

    async def read(self) -> None:
        """Read the sizes of all pools, and set those that are to be others."""
        for pool, name in self._names.items():
            seen = await self._api.get(name)
            count = self._wanted.get(pool, seen.wanted)
            if count != seen.wanted:
                # None: it has changed meanwhile, and is read again.
                changed = await self._api.set(name, seen, count)
                _log.info("pool_changed", pool=pool, deployment=name, wanted=count)
                seen = changed or seen
            self._scales[pool] = seen
        self._seen_s = _now_s()

    async def serve(self) -> None:
        """Keep sizes as they are wanted, until cancelled."""
        while True:
            try:
                await self.read()
            except PagemillError as error:
                _log.warning("scale_failed", code=error.code, reason=error.message)
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
