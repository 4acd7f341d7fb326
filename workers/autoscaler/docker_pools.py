"""The actuator for Docker: pools are services of a compose project.

`pagemill docker-proxy` starts and stops their containers, because Docker's own socket would make an
autoscaler root of the machine.
"""

from collections.abc import Sequence

import structlog
from msgspec import Struct

from shared.protocol.messages import WorkerSlot
from workers.actuator import choose_changes
from workers.autoscaler.docker_api import ProxyApi
from workers.autoscaler.remote_pools import RemotePools
from workers.docker_messages import DockerWorker
from workers.pools import Pools

_log = structlog.get_logger()


class _Wish(Struct, frozen=True):
    """What the plan has asked of one pool, see `Actuator.wanted`."""

    count: int
    drain: Sequence[int]
    give_up: Sequence[int]


class DockerPools(RemotePools):
    """Actuator over services of a compose project; a slot's place is the container's number."""

    def __init__(self, api: ProxyApi, pools: Pools) -> None:
        super().__init__(pools)
        self._api = api
        self._services = {pool.name: service for service, pool in pools.by_service().items()}
        self._workers: dict[str, list[DockerWorker]] = {}
        self._wishes: dict[str, _Wish] = {}
        """Changes to make at the next look, and then no more: the plan repeats its own."""

    def running(self, pool: str) -> list[WorkerSlot]:
        self._check_known(pool)
        first = self._first_slots[pool]
        return [
            WorkerSlot(first + worker.number, worker.pid, worker.draining, worker.addresses)
            for worker in self._workers[pool]
        ]

    def wanted(
        self, pool: str, count: int, drain: Sequence[int] = (), give_up: Sequence[int] = ()
    ) -> bool:
        wish = _Wish(count, drain, give_up)
        victims, num_new = self._changes(pool, wish)
        if not victims and not num_new:
            self._wishes.pop(pool, None)
            return False
        self._wishes[pool] = wish
        self.ask()
        return True

    async def _read(self, pool: str) -> None:
        self._workers[pool] = await self._api.workers(self._services[pool])

    async def _change(self, pool: str) -> None:
        if (wish := self._wishes.pop(pool, None)) is None:
            return
        service, first = self._services[pool], self._first_slots[pool]
        victims, num_new = self._changes(pool, wish)
        for slot in victims:
            self._workers[pool] = await self._api.stop(service, slot - first)
        for _ in range(num_new):
            self._workers[pool] = await self._api.start(service)
        if victims or num_new:
            stopped = [slot - first for slot in victims]
            _log.info("pool_changed", pool=pool, service=service, started=num_new, stopped=stopped)

    def _changes(self, pool: str, wish: _Wish) -> tuple[list[int], int]:
        first = self._first_slots[pool]
        staying = [first + one.number for one in self._workers[pool] if not one.draining]
        return choose_changes(staying, wish.count, wish.drain, wish.give_up)
