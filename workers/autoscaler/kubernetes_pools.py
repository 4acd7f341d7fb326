"""Actuator for Kubernetes: pools are Deployments, whose pods the API server starts and stops.

Before a pool shrinks, its pods get deletion costs, so that the cluster ends the least loaded ones.
They drain, like any other worker.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from shared.errors import ConfigError, PagemillError, Unavailable
from shared.protocol.messages import Heartbeat, WorkerSlot
from shared.state.scale_state import REPORT_AGE_S
from workers.actuator import REPORT_S, Actuator
from workers.autoscaler.kubernetes_api import Scale, ScaleApi
from workers.autoscaler.presence import HELD, PINNED
from workers.pools import Pools

# Slots of a pool are numbered from a multiple of this.
MAX_SLOTS = 10_000
# More than the tasks of any worker.
PINNED_COST = 1_000_000
# A failure that stays the same is logged once in this time.
REPEAT_S = 60.0

ReadHeartbeats = Callable[[], Awaitable[Sequence[Heartbeat]]]

_log = structlog.get_logger()


class KubernetesPools(Actuator):
    """Actuator that reads and changes Deployments once a second; its slots only count workers.

    A failure affects one pool alone: it is not reported and keeps its size, and the other pools are
    scaled.
    """

    host = ""

    def __init__(self, api: ScaleApi, pools: Pools, heartbeats: ReadHeartbeats) -> None:
        self._api = api
        self._read_heartbeats = heartbeats
        self._names = {name: pool.deployment for name, pool in pools.by_name.items()}
        self._first_slots = {name: n * MAX_SLOTS for n, name in enumerate(self._names)}
        self._scales: dict[str, Scale] = {}
        self._wanted: dict[str, int] = {}
        """Sizes to set at the next read. Each is set once: a later change is another client's."""
        self._read_s: dict[str, float] = {}
        """Time of the last read of each pool's workers."""
        self._logged_s: dict[tuple[str, str], float] = {}
        """Time when each failure of a pool was last logged."""
        self._woken = asyncio.Event()

    def pools(self) -> Sequence[str]:
        if not (pools := [pool for pool in self._names if self._is_known(pool)]):
            raise Unavailable("the workers of no pool were read lately")
        return pools

    def running(self, pool: str) -> list[WorkerSlot]:
        if not self._is_known(pool):
            raise Unavailable(f"the workers of {pool} were not read lately")
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
        self._woken.set()
        return True

    async def read(self) -> dict[str, PagemillError]:
        """Read each pool's workers, set the size of the plan, and return the failures by pool."""
        failures = {}
        for pool in self._names:
            try:
                self._scales[pool] = await self._api.get(self._names[pool])
                self._read_s[pool] = asyncio.get_running_loop().time()
                await self._change(pool)
            except PagemillError as error:
                failures[pool] = error
        return failures

    async def check(self) -> None:
        """Read the workers for the first time.

        Raises ConfigError for a permanent refusal, and Unavailable if no pool can be read.
        """
        failures = await self.read()
        for pool, error in failures.items():
            if isinstance(error, ConfigError):
                raise ConfigError(f"pool {pool}: {error.message}", field=error.field)
        if failures and not self._read_s:
            raise next(iter(failures.values()))
        self.log_failures(failures)

    async def serve(self) -> None:
        """Keep pools at the size of the plan, until cancelled."""
        while True:
            self.log_failures(await self.read())
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()

    def log_failures(self, failures: Mapping[str, PagemillError]) -> None:
        """Log each failure, once a minute as long as it stays the same."""
        now_s = asyncio.get_running_loop().time()
        self._logged_s = {
            key: at_s for key, at_s in self._logged_s.items() if now_s < at_s + REPEAT_S
        }
        for pool, error in failures.items():
            if (pool, error.message) not in self._logged_s:
                self._logged_s[pool, error.message] = now_s
                _log.warning("pool_not_scaled", pool=pool, code=error.code, reason=error.message)

    async def _change(self, pool: str) -> None:
        name, scale = self._names[pool], self._scales[pool]
        count = self._wanted.pop(pool, scale.wanted)
        if count < scale.wanted:
            await self._set_costs(pool, scale)
        # None if another client has changed the size meanwhile. The next read gets it.
        if count != scale.wanted and (changed := await self._api.set(name, scale, count)):
            _log.info("pool_changed", pool=pool, deployment=name, wanted=count)
            self._scales[pool] = changed

    async def _set_costs(self, pool: str, scale: Scale) -> None:
        """Set the deletion costs of a pool's pods. A failure must not keep the pool large."""
        try:
            pods = await self._api.pods(scale)
            for pod, cost in deletion_costs(pods, await self._read_heartbeats()).items():
                await self._api.set_deletion_cost(pod, cost)
        except PagemillError as error:
            _log.warning("pods_not_chosen", pool=pool, code=error.code, reason=error.message)

    def _is_known(self, pool: str) -> bool:
        read_s = self._read_s.get(pool)
        return read_s is not None and asyncio.get_running_loop().time() - read_s <= REPORT_AGE_S


def deletion_costs(pods: Sequence[str], heartbeats: Sequence[Heartbeat]) -> dict[str, int]:
    """Return the cost of each pod: its tasks in flight, and more with payloads to fetch.

    A pod without a heartbeat has not begun any task.
    """
    loads = {beat.hostname: beat.load for beat in heartbeats}
    costs = {}
    for pod in pods:
        load = loads.get(pod, {})
        costs[pod] = int(load.get(HELD, 0)) + PINNED_COST * bool(load.get(PINNED))
    return costs
