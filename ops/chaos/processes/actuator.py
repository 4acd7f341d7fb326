"""The process that starts and drains the engines of a scaled pool, as `pagemill up` does.

It runs the product's own code, except that it starts watched engines. It writes starts, drains and
ends of engines to the journal of the run's processes.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import uvloop
from cyclopts import App, Parameter

from ops.chaos.bugs import catalog
from ops.chaos.history import Drained, Journal, ProcessExited, Ready, Started, WorkerEvent, now
from ops.chaos.plan import ROOT
from ops.chaos.processes.pool import ACTUATOR, WATCH_S, WORKER_MODULE, has_announced, worker_command
from ops.chaos.processes.preloading import fork_engine_preloader
from shared.helpers.task_set import TaskSet
from shared.telemetry import logs
from workers import settings
from workers.actuator import follow_plan
from workers.pools import Pools, pools_of
from workers.roles import WorkerSpec
from workers.supervisor.cluster import LocalCluster
from workers.supervisor.pool import SupervisedPools
from workers.supervisor.preloader import Preloader
from workers.supervisor.processes import WorkerProcesses
from workers.supervisor.supervisor import Process, Supervisor

app = App(name="chaos-actuator")


class WatchedProcesses(WorkerProcesses):
    """Starts watched engines, and writes their events to the run's journal."""

    def __init__(self, folder: Path, arguments: list[str], preloader: Preloader) -> None:
        """`folder` is the run's, and `arguments` are an engine's."""
        super().__init__(None, preloader=preloader)
        self.folder, self._arguments_of_engine = folder, arguments
        self._preloader = preloader
        self.journal = Journal(folder / "pool.jsonl")
        self._watching, self._num_spawned = TaskSet(), 0

    async def __call__(self, worker: WorkerSpec) -> Process:
        began = now()
        self._num_spawned += 1
        env = {**os.environ, "CHAOS_SEED": f"{os.environ['CHAOS_SEED']}:{self._num_spawned}"}
        with (self.folder / "logs" / f"{worker.role}.log").open("ab") as stderr:
            process = await self._preloader.start(
                self._arguments_of_engine, stderr=stderr.fileno(), env=env, folder=str(ROOT)
            )
        self.journal.write(Started(began, worker.role, 0, process.pid))
        self._watching.start(self._follow_process(worker.role, began, process))
        return process

    async def _follow_process(self, role: str, began: float, process: Process) -> None:
        file = self.folder / "workers" / f"{role}-{process.pid}.jsonl"
        ended = asyncio.ensure_future(process.wait())
        while not ended.done() and not has_announced(file):
            await asyncio.wait({ended}, timeout=WATCH_S)
        if not ended.done():
            self.journal.write(Ready(now(), role, 0, process.pid, now() - began))
        code = await ended
        self.journal.write(ProcessExited(now(), role, 0, process.pid, code, False))


class WatchedPools(SupervisedPools):
    """Pools of engines that write drains to the run's journal."""

    def __init__(self, supervisor: Supervisor, pools: Pools, journal: Journal) -> None:
        super().__init__(supervisor, pools.by_name.values())
        self._journal = journal

    def wanted(
        self, pool: str, count: int, drain: Sequence[int] = (), give_up: Sequence[int] = ()
    ) -> bool:
        before = {slot.slot: slot for slot in self.running(pool) if not slot.draining}
        changed = super().wanted(pool, count, drain, give_up)
        for slot in self.running(pool):
            if slot.draining and slot.slot in before:
                self._journal.write(Drained(now(), "engine", slot.slot, before[slot.slot].pid))
        return changed


async def _run(cluster: LocalCluster, folder: Path) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    try:
        await cluster.start()
        announced = Journal(folder / "workers" / f"{ACTUATOR}-{os.getpid()}.jsonl")
        announced.write(WorkerEvent(now(), "ready"))
        await stopping.wait()
    finally:
        await cluster.stop()


@app.default
def main(
    *,
    folder: Path,
    config: Path,
    nats: Annotated[str, Parameter(name="--nats")],
    step_ms: float,
) -> int:
    """Run the actuator until SIGTERM.

    Parameters
    ----------
    folder
        Folder of the run.
    step_ms
        Duration of a step of the fake engine.
    """
    # Before there is a thread or an event loop.
    preloader = fork_engine_preloader()
    logs.configure_logging("warning", role=ACTUATOR)
    loaded: Any = settings.load_config(config)
    command = worker_command("engine", config, nats, fake=True, step_ms=step_ms)
    arguments = command[command.index(WORKER_MODULE) + 1 :]
    processes = WatchedProcesses(folder, arguments, preloader)
    cluster = LocalCluster(loaded, config, [], nats, processes=processes)
    local = WatchedPools(cluster.supervisor, pools_of(loaded), processes.journal)
    cluster.follow = lambda bus: follow_plan(bus, local)
    catalog.plant(os.environ.get("CHAOS_BUG", ""), ACTUATOR)
    uvloop.run(_run(cluster, folder))
    return 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
