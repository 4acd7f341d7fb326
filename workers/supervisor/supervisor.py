"""Supervisor of worker processes on one machine: restarts, drain and end."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

import structlog

from shared.errors import ConfigError
from shared.helpers.task_set import TaskSet
from shared.protocol.messages import WorkerSlot
from workers.roles import WorkerSpec

_log = structlog.get_logger()

FIRST_RESTART_S = 0.5
MAX_RESTART_S = 10.0
# Time beyond the drain before a worker is killed.
STOP_GRACE_S = 5.0


class Process(Protocol):
    """Process of a worker, such as `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Spawn(Protocol):
    """Function that starts the process of a worker. Raises OSError or ConfigError."""

    async def __call__(self, worker: WorkerSpec) -> Process: ...


Places: TypeAlias = Callable[[WorkerSpec], contextlib.AbstractContextManager[WorkerSpec]]
"""Function that gives a worker a place on a device until its end. Raises ConfigError."""


class Supervisor:
    """Keeps a worker running in each slot: a process that ends is replaced, unless it drains."""

    def __init__(
        self,
        spawn: Spawn,
        drain_s: float,
        on_ended: Callable[[WorkerSpec, int], None],
        places: Places | None = None,
    ) -> None:
        """`on_ended` is called with the exit code of each process that ends without a drain, and
        will be started again. With `places`, a worker that computes on a GPU has a place on one of
        them until it ends."""
        self._spawn = spawn
        self._places = places
        self._patience_s = drain_s + STOP_GRACE_S
        self._on_ended = on_ended
        self._workers: list[WorkerSpec] = []
        """Workers by slot, also those that have been drained."""
        self.processes: dict[int, Process] = {}
        """The last process of each slot, which may have ended."""
        self._keepers: dict[int, asyncio.Task[None]] = {}
        """Tasks that keep workers running, by slot."""
        self._draining: set[int] = set()
        self._ending = TaskSet()

    def add(self, worker: WorkerSpec) -> int:
        """Start a worker, and return the number of its slot."""
        slot = len(self._workers)
        self._workers.append(worker)
        self._keepers[slot] = asyncio.create_task(self._keep(slot, worker))
        self._keepers[slot].add_done_callback(lambda _: self._keepers.pop(slot, None))
        return slot

    def drain(self, slot: int) -> None:
        """Drain a worker without a replacement. It is killed if its drain takes too long."""
        self._draining.add(slot)
        process = self.processes.get(slot)
        if process is not None and process.returncode is None:
            self._end_later(process)

    def slots(self, worker: WorkerSpec) -> list[WorkerSlot]:
        """Return the slots with workers of this kind that run, start or drain."""
        slots = [slot for slot in self._keepers if self._workers[slot] == worker]
        return [WorkerSlot(slot, self._pid(slot), slot in self._draining) for slot in slots]

    def pids(self, role: str) -> list[int]:
        """Return the process ids of the running workers of a role."""
        pids = [self._pid(slot) for slot in self.processes if self._workers[slot].role == role]
        return [pid for pid in pids if pid]

    def requeue_now(self) -> None:
        """During `stop`: make the workers requeue the requests in flight at once."""
        for process in self._running().values():
            process.terminate()

    def reload(self) -> None:
        """Make the workers read their configuration again."""
        for process in self._running().values():
            process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        """Drain all workers, and return when they have ended."""
        tasks = [*self._keepers.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        running = self._running()
        for slot, process in running.items():
            # A second signal would make a draining worker requeue requests that it could finish.
            if slot not in self._draining:
                process.terminate()
        await asyncio.gather(*(_end(process, self._patience_s) for process in running.values()))

    def _running(self) -> dict[int, Process]:
        return {slot: p for slot, p in self.processes.items() if p.returncode is None}

    def _pid(self, slot: int) -> int:
        process = self.processes.get(slot)
        return 0 if process is None or process.returncode is not None else process.pid

    def _end_later(self, process: Process) -> None:
        process.terminate()
        self._ending.start(_end(process, self._patience_s))

    async def _keep(self, slot: int, worker: WorkerSpec) -> None:
        """Run one worker, and start it again whenever it ends, until it is drained."""
        with contextlib.ExitStack() as until_drained:
            await self._restart(slot, partial(self._place, worker, until_drained))

    async def _restart(self, slot: int, place: Callable[[], WorkerSpec]) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_RESTART_S
        worker, placed = self._workers[slot], None
        while slot not in self._draining:
            try:
                placed = placed or place()
                process = await self._spawn(placed)
            except (OSError, ConfigError) as error:
                _log.error(
                    "worker_not_started", role=worker.role, reason=str(error), retry_in_s=pause_s
                )
            else:
                self.processes[slot] = process
                began = loop.time()
                if slot in self._draining:
                    self._end_later(process)
                code = await process.wait()
                if loop.time() - began > MAX_RESTART_S:
                    pause_s = FIRST_RESTART_S
                if slot in self._draining:
                    _log.info("worker_drained", role=worker.role, code=code)
                    del self.processes[slot]
                    break
                _log.warning("worker_ended", role=worker.role, code=code, restart_in_s=pause_s)
                self._on_ended(worker, code)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RESTART_S)

    def _place(self, worker: WorkerSpec, until_drained: contextlib.ExitStack) -> WorkerSpec:
        """Return the worker with a place on a GPU, if it needs one. Raises ConfigError."""
        return worker if self._places is None else until_drained.enter_context(self._places(worker))


async def _end(process: Process, patience_s: float) -> None:
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
