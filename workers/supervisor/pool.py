"""Pools of worker processes: their actuator, and the worker of the role `pool`.

This worker supervises the workers of some roles, such as in one container. For each role it starts
the pools in `scale.pools`, which then follow the plan, or without pools the `replicas` of the
stage. It starts no broker and no gateway.
"""

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from shared.blobs.server import host_id
from shared.config.schema import Config
from shared.errors import ConfigError
from shared.protocol.messages import WorkerSlot
from shared.stage.pipelines import pipelines_of
from shared.stage.runtime import EXIT_CONFIG, Context
from workers.actuator import Actuator, choose_changes, follow_plan
from workers.pools import Pool, pools_of, workers_of
from workers.roles import WorkerSpec
from workers.supervisor.gpus import WorkerPlaces, plan_gpus, read_needed_gpus
from workers.supervisor.processes import WorkerProcesses
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


def read_roles(names: str | None, config: Config, url: str | None) -> list[str]:
    """Return the roles of a list such as `engine,encoder`, each with a stage in the configuration.

    `url` is the URL of the broker on the command line. Raises ConfigError.
    """
    if url is None and config.nats.url is None:
        raise ConfigError("nats.url: a pool needs the URL of its broker", field="nats.url")
    served = {stage.role for pipeline in pipelines_of(config).values() for stage in pipeline.stages}
    roles = list(dict.fromkeys((names or "").split(",")))
    for role in roles:
        if role not in served:
            raise ConfigError(
                f"--roles: no stage of role {role!r} is configured; name roles of:"
                f" {', '.join(sorted(served))}",
                field="roles",
            )
    return roles


def plan_workers(config: Config, roles: Sequence[str]) -> tuple[list[WorkerSpec], list[Pool]]:
    """Return the workers of these roles to start at once, and their pools."""
    pools = pools_of(config)
    workers = [worker for worker in workers_of(config, pools) if worker.role in roles]
    return workers, [pool for pool in pools.by_name.values() if pool.spec.role in roles]


async def main(context: Context, roles: Sequence[str], processes: WorkerProcesses) -> None:
    workers, pools = plan_workers(context.config, roles)

    def log_refusal(worker: WorkerSpec, code: int) -> None:
        if code == EXIT_CONFIG:
            context.log.error("configuration_refused", role=worker.role, model=worker.model)

    gpus = read_needed_gpus(context.config, [*workers, *(pool.spec for pool in pools)])
    for title, place in plan_gpus(context.config, workers, gpus):
        context.log.info("gpu_planned", worker_title=title, place=str(place))
    places = WorkerPlaces(context.config, gpus)
    supervisor = Supervisor(processes, context.config.delivery.drain_s, log_refusal, places)
    context.reloader.takers.append(lambda _: supervisor.reload())
    for worker in workers:
        supervisor.add(worker)
    actuator = SupervisedPools(supervisor, pools)
    following = asyncio.create_task(follow_plan(context.bus, actuator))
    try:
        context.ready([], dict)
        await context.shutdown.asked.wait()
    finally:
        following.cancel()
        hurry = asyncio.create_task(_requeue_when_hurried(context, supervisor))
        await supervisor.stop()
        hurry.cancel()
        processes.close()


async def _requeue_when_hurried(context: Context, supervisor: Supervisor) -> None:
    await context.shutdown.hurry.wait()
    supervisor.requeue_now()
