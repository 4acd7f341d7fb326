"""The process that starts and drains the engines of a scaled pool, as `pagemill up` does.

All of it is the product's own but the start of an engine, which is a watched one. What happens to
engines goes to the journal of the run's processes.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import uvloop
from cyclopts import App, Parameter

from ops.chaos.bugs import catalog
from ops.chaos.history import (
    Drained,
    Journal,
    ProcessExited,
    Ready,
    Started,
    WorkerEvent,
    now,
    read_events,
)
from ops.chaos.plan import ROOT
from ops.chaos.processes.pool import ACTUATOR, WATCH_S, WORKER_MODULE, worker_command
from ops.chaos.processes.preloading import fork_engine_preloader
from shared.helpers.task_set import TaskSet
from shared.telemetry import logs
from workers import settings
from workers.actuator import follow_plan
from workers.pools import pools_of
from workers.roles import WorkerSpec
from workers.supervisor.cluster import LocalCluster, Process
from workers.supervisor.pools import LocalPools

app = App(name="chaos-actuator")


class WatchedCluster(LocalCluster):
    """A local cluster whose workers are watched ones of a chaos run."""

    folder: Path
    """That of the run."""
    arguments: list[str]
    """Those of an engine."""
    journal: Journal

    def watch(self, folder: Path, arguments: list[str]) -> None:
        """Set what the constructor of the base has no place for."""
        self.folder, self.arguments = folder, arguments
        self.journal = Journal(folder / "pool.jsonl")
        self._watching, self._num_spawned = TaskSet(), 0

    def drain_worker(self, number: int) -> None:
        process = self._processes.get(number)
        pid = 0 if process is None else process.pid
        self.journal.write(Drained(now(), self._specs[number].role, number, pid))
        super().drain_worker(number)

    async def _spawn(self, spec: WorkerSpec) -> Process:
        assert self.preloader is not None
        began = now()
        self._num_spawned += 1
        env = {**os.environ, "CHAOS_SEED": f"{os.environ['CHAOS_SEED']}:{self._num_spawned}"}
        with (self.folder / "logs" / f"{spec.role}.log").open("ab") as stderr:
            process = await self.preloader.start(
                self.arguments, stderr=stderr.fileno(), env=env, folder=str(ROOT)
            )
        self.journal.write(Started(began, spec.role, 0, process.pid))
        self._watching.start(self._follow_process(spec.role, began, process))
        return process

    async def _follow_process(self, role: str, began: float, process: Process) -> None:
        file = self.folder / "workers" / f"{role}-{process.pid}.jsonl"
        ended = asyncio.ensure_future(process.wait())
        while not ended.done() and not _has_announced(file):
            await asyncio.wait({ended}, timeout=WATCH_S)
        if not ended.done():
            self.journal.write(Ready(now(), role, 0, process.pid, now() - began))
        code = await ended
        self.journal.write(ProcessExited(now(), role, 0, process.pid, code, False))


def _has_announced(file: Path) -> bool:
    events = read_events(file)
    return any(isinstance(event, WorkerEvent) and event.what == "ready" for event in events)


async def _run(cluster: WatchedCluster) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    try:
        await cluster.start()
        announced = Journal(cluster.folder / "workers" / f"{ACTUATOR}-{os.getpid()}.jsonl")
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
    cluster = WatchedCluster(loaded, config, [], nats, preloader=preloader)
    cluster.watch(folder, command[command.index(WORKER_MODULE) + 1 :])
    local = LocalPools(cluster, pools_of(loaded))
    cluster.follow = lambda bus: follow_plan(bus, local)
    catalog.plant(os.environ.get("CHAOS_BUG", ""), ACTUATOR)
    uvloop.run(_run(cluster))
    return 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
