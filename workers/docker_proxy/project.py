"""The containers of one compose project that the proxy may start and stop."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from itertools import count

import structlog

from shared.errors import ConfigError, NotFound, PagemillError
from shared.helpers.task_set import TaskSet
from workers.docker_messages import DockerWorker
from workers.docker_proxy.definition import NUMBER, ONE_OFF, PROJECT, SERVICE, define
from workers.docker_proxy.engine import Engine, Listed
from workers.docker_proxy.rules import Refused
from workers.pools import Pool

CREATED = "created"
STOPPED = (CREATED, "exited")
PRESENT = ("running", "restarting", "paused")

_log = structlog.get_logger()


async def find_project(engine: Engine, container: str) -> str:
    """Return the compose project of a container.

    Raises ConfigError if it has none, and Unavailable without an engine.
    """
    try:
        config = (await engine.inspect(container))["Config"]
    except NotFound:
        config = {}
    project: str | None = (config.get("Labels") or {}).get(PROJECT)
    if project is None:
        raise ConfigError(
            f"--project: {container!r} is no container of a compose project: name the project",
            field="--project",
        )
    return project


class Project:
    """Containers of the pools' services of one compose project.

    A container that is stopped is removed unless it is the last one of its service: others are
    created from its definition. Methods raise Refused, NotFound and Unavailable.
    """

    def __init__(
        self, engine: Engine, name: str, pools: Mapping[str, Pool], default_grace_s: int
    ) -> None:
        """`default_grace_s` is for services without `stop_grace_period`."""
        self._engine = engine
        self._name = name
        self.pools = pools
        """By service."""
        self._default_grace_s = default_grace_s
        self._changing = asyncio.Lock()
        self._draining: set[str] = set()
        self._ending = TaskSet()

    async def workers(self, service: str) -> list[DockerWorker]:
        """Return the workers of a service: those that start or run, and those that drain."""
        there = [one for one in await self._list(service) if self._is_there(one)]
        read = await asyncio.gather(*map(self._read, there))
        return sorted((one for one in read if one is not None), key=lambda one: one.number)

    async def start(self, service: str) -> None:
        """Start a stopped container of the service, or else a further one."""
        async with self._changing:
            found = await self._remove_unfinished(await self._list(service))
            self._check_max(service, found)
            if not found:
                raise Refused(
                    HTTPStatus.CONFLICT,
                    "definition",
                    f"project {self._name!r} has no container of service {service!r} to take the"
                    f" definition from: `docker compose up --detach {service}` creates one",
                )
            # The one that compose has created last has the newest definition.
            found.sort(key=lambda one: one.created)
            stopped = [one for one in found if one.state in STOPPED and not self._drains(one)]
            container = stopped[-1].id if stopped else await self._create(found)
            await self._engine.start(container)
        _log.info("container_started", service=service, container=container)

    async def stop(self, service: str, number: int) -> None:
        """Begin to stop a worker; it has its service's grace period to drain."""
        async with self._changing:
            found = [one for one in await self._list(service) if _number(one) == number]
            there = [one for one in found if self._is_there(one)]
            if not there:
                raise Refused(
                    HTTPStatus.NOT_FOUND, "worker", f"service {service!r} has no worker {number}"
                )
            for one in there:
                if not self._drains(one):
                    self._draining.add(one.id)
                    self._ending.start(self._end(service, one.id))

    async def close(self) -> None:
        """Leave containers that drain to the engine."""
        for task in list(self._ending):
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _end(self, service: str, container: str) -> None:
        """Stop a container, and remove it unless it is the last one of its service."""
        try:
            config = (await self._engine.inspect(container))["Config"]
            await self._engine.stop(container, config.get("StopTimeout") or self._default_grace_s)
            async with self._changing:
                is_last = all(one.id == container for one in await self._list(service))
                if not is_last:
                    await self._engine.remove(container)
            _log.info("container_stopped", service=service, container=container, kept=is_last)
        except PagemillError as error:
            _log.warning("container_not_stopped", service=service, reason=error.message)
        finally:
            self._draining.discard(container)

    def _check_max(self, service: str, found: list[Listed]) -> None:
        pool = self.pools[service]
        num_draining = sum(self._drains(one) for one in found)
        num_workers = sum(self._is_there(one) for one in found) - num_draining
        if num_workers >= pool.settings.max:
            raise Refused(
                HTTPStatus.CONFLICT,
                "max",
                f"pool {pool.name} has {num_workers} workers, and scale.pools gives it a max of"
                f" {pool.settings.max}",
            )
        if num_workers + num_draining >= 2 * pool.settings.max:
            # All may be replaced while they drain, but not again and again.
            raise Refused(
                HTTPStatus.CONFLICT,
                "max",
                f"pool {pool.name} has {num_workers} workers and {num_draining} that drain,"
                f" together twice its max of {pool.settings.max}",
            )

    async def _remove_unfinished(self, found: list[Listed]) -> list[Listed]:
        """Remove containers that lack networks which others of the service have; return the rest.

        A proxy that has died before it connected a new container leaves it so.
        """
        most = max((one.networks for one in found), key=len, default=set())
        unfinished = [one for one in found if one.state == CREATED and one.networks < most]
        for one in unfinished:
            await self._engine.remove(one.id)
        return [one for one in found if one not in unfinished]

    async def _create(self, found: list[Listed]) -> str:
        """Create a container from the definition of the last of these; return its id."""
        used = {_number(one) for one in found}
        number = next(number for number in count(1) if number not in used)
        definition = define(await self._engine.inspect(found[-1].id), number)
        container = await self._engine.create(definition.name, definition.body)
        try:
            for network, endpoint in definition.networks.items():
                await self._engine.connect(network, container, endpoint)
        except PagemillError:
            await self._engine.remove(container)
            raise
        return container

    async def _list(self, service: str) -> list[Listed]:
        return await self._engine.find({PROJECT: self._name, SERVICE: service, ONE_OFF: "False"})

    async def _read(self, one: Listed) -> DockerWorker | None:
        try:
            pid = (await self._engine.inspect(one.id))["State"]["Pid"]
        except NotFound:
            return None
        return DockerWorker(_number(one), pid, self._drains(one), one.addresses)

    def _drains(self, one: Listed) -> bool:
        return one.id in self._draining

    def _is_there(self, one: Listed) -> bool:
        return one.state in PRESENT or self._drains(one)


def _number(one: Listed) -> int:
    number = one.labels.get(NUMBER, "")
    return int(number) if number.isdecimal() else 0
