"""The processes of a run: started, watched, sent faults on demand, and started again at once.

Unlike `pagemill up` the pool does not pause before a restart, so that faults always find a running
process.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from ops.chaos.history import (
    Fault,
    Journal,
    MemorySample,
    ProcessExited,
    Ready,
    Snapshot,
    Started,
    WorkerEvent,
    now,
    read_events,
)
from ops.chaos.plan import PAINTER, ROOT, TALKER, VOCODER
from ops.chaos.processes.brokers import Brokers
from shared.helpers.forking import end_with_parent
from shared.stage.graphs import PARTS
from workers.supervisor.preloader import Preloader
from workers.supervisor.supervisor import Process

# Engines with a model import torch first, which takes long on a busy machine.
READY_TIMEOUT_S = 180.0
WATCH_S = 0.1
NUM_SNAPSHOTS, SNAPSHOT_PAUSE_S = 3, 0.4
MEMORY_S = 2.0
# One fault in this many may hit a process that is not ready yet.
STARTING_TOO = 8
# A process whose drain takes longer hangs.
EXIT_TIMEOUT_S = 30.0
# The clients' process is started on demand, and restarted only until it succeeds.
LOAD = "load"
# The process that starts the engines of a scaled pool is no worker.
ACTUATOR = "actuator"
# Without a pause, a process that ends right after its start would be restarted in a busy loop.
FAILED_START_S = 1.0
FAILED_START_PAUSE_S = 0.3
MAX_FAILED_STARTS = 10
WORKER_MODULE = "ops.chaos.worker"
# Roles in the product of the workers of these stages.
STAGE_ROLES = {TALKER: "engine"} | dict.fromkeys((VOCODER, PAINTER, *PARTS), "generator")


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one process of a role, with its current process."""

    role: str
    number: int
    command: list[str] = field(default_factory=list)
    process: Process | None = None
    began: float = 0.0
    ready: bool = False
    expected_exit: bool = False
    """The pool has sent the process a signal to end."""
    num_failed_starts: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def is_up(self) -> bool:
        return self.is_alive and (self.ready or self.role == LOAD)


class Pool:
    """Owns the brokers and all other processes; `url` is where clients connect."""

    def __init__(
        self,
        folder: Path,
        brokers: Brokers,
        counts: dict[str, int],
        env: dict[str, str],
        journal: Journal,
        preloaders: Mapping[str, Preloader] = {},
    ) -> None:
        """`counts` has the number of slots by role. Every slot needs a command before its start.

        Workers of a role are forked from the role's preloader; without one, they are executed.
        """
        self.folder = folder
        self.brokers = brokers
        self.journal = journal
        self.slots = [
            Slot(role, number) for role, count in counts.items() for number in range(count)
        ]
        self._env = env
        self._preloaders = preloaders
        self._runs: dict[Slot, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._keeps_running = True
        self._num_started = 0

    async def start(self) -> None:
        """Start brokers and workers; return when every worker has announced itself."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self.brokers.start)
        for slot in self.slots:
            if slot.role != LOAD:
                self.start_slot(slot)
        self._tasks += [
            asyncio.create_task(self._keep_brokers()),
            asyncio.create_task(self._watch_ready()),
            asyncio.create_task(self._watch_memory()),
        ]
        await self.wait_ready()

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until all workers are ready. Raises TimeoutError with the names of the others."""
        deadline = now() + timeout_s
        while missing := [f"{s.role}-{s.number}" for s in self._runs if not s.is_up]:
            self._raise_failures()
            hopeless = any(s.num_failed_starts > MAX_FAILED_STARTS for s in self._runs)
            if hopeless or now() > deadline:
                raise TimeoutError(f"not ready: {', '.join(missing)}; see {self.folder / 'logs'}")
            await asyncio.sleep(WATCH_S)

    def start_slot(self, slot: Slot) -> None:
        self._runs[slot] = asyncio.create_task(self._run(slot))

    async def run_load(self) -> None:
        """Run the clients' process until it has finished its plan."""
        (slot,) = [slot for slot in self.slots if slot.role == LOAD]
        self.start_slot(slot)
        try:
            await self._runs[slot]
        finally:
            if slot.is_alive and slot.process is not None:
                slot.process.kill()
            del self._runs[slot]

    def _raise_failures(self) -> None:
        for task in [*self._runs.values(), *self._tasks]:
            if task.done() and not task.cancelled():
                task.result()

    @property
    def num_starting(self) -> int:
        """Number of workers that run and are not ready yet."""
        return sum(slot.is_alive and not slot.is_up for slot in self.slots)

    # -- faults -----------------------------------------------------------------------------

    def send_signal(self, kind: str, role: str, number: signal.Signals, pick: int) -> int | None:
        """Send a signal to a process of `role`; return its id, or None if none is running."""
        if role == "broker":
            pid = self.brokers.pick_victim()
            slot_number = 0
        else:
            slot = self._pick(role, pick)
            if slot is None:
                return None
            slot.expected_exit |= number in (signal.SIGKILL, signal.SIGTERM)
            pid, slot_number = slot.pid, slot.number
        if pid is None:
            return None
        self.journal.write(Fault(now(), kind, role, slot_number, pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def resume(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            slot = next((slot for slot in self.slots if slot.pid == pid), None)
            role, number = (slot.role, slot.number) if slot is not None else ("broker", 0)
            if slot is None or slot.ready:
                self.journal.write(Ready(now(), role, number, pid, 0.0))

    def _pick(self, role: str, pick: int) -> Slot | None:
        """Pick a process, in most cases a ready one.

        A starting process has no work to lose, and on a slow machine none would become ready.
        """
        alive = [slot for slot in self.slots if slot.role == role and slot.is_alive]
        ready = [slot for slot in alive if slot.is_up]
        chosen = alive if pick % STARTING_TOO == 0 else ready
        return chosen[pick // STARTING_TOO % len(chosen)] if chosen else None

    async def restart(self, slot: Slot) -> int:
        """Drain one worker, wait for its successor, and return the first one's exit code."""
        assert slot.process is not None
        process = slot.process
        self.journal.write(Fault(now(), "drain", slot.role, slot.number, slot.pid))
        slot.expected_exit = True
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S)
        await self.wait_ready()
        return code

    # -- supervision ------------------------------------------------------------------------

    async def _run(self, slot: Slot) -> None:
        while self._keeps_running:
            slot.ready = slot.expected_exit = False
            slot.began = now()
            log = self.folder / "logs" / f"{slot.role}-{slot.number}.log"
            self._num_started += 1
            env = self._env | {"CHAOS_SEED": f"{self._env['CHAOS_SEED']}:{self._num_started}"}
            with log.open("ab") as stderr:
                slot.process = await self._spawn(slot, os.environ | env, stderr.fileno())
            self.journal.write(Started(slot.began, slot.role, slot.number, slot.pid))
            code = await slot.process.wait()
            self.journal.write(
                ProcessExited(now(), slot.role, slot.number, slot.pid, code, slot.expected_exit)
            )
            if slot.role == LOAD and code == 0:
                return
            if not slot.expected_exit and now() - slot.began < FAILED_START_S:
                slot.num_failed_starts += 1
                await asyncio.sleep(FAILED_START_PAUSE_S)

    async def _spawn(self, slot: Slot, env: dict[str, str], stderr: int) -> Process:
        if (preloader := self._preloaders.get(slot.role)) is not None:
            arguments = slot.command[slot.command.index(WORKER_MODULE) + 1 :]
            return await preloader.start(arguments, stderr=stderr, env=env, folder=str(ROOT))
        return await asyncio.create_subprocess_exec(
            *slot.command,
            cwd=ROOT,
            env=env,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    async def _keep_brokers(self) -> None:
        while self._keeps_running:
            await asyncio.sleep(WATCH_S)
            began = now()
            for pid in await asyncio.to_thread(self.brokers.revive):
                self.journal.write(Ready(now(), "broker", 0, pid, now() - began))

    async def _watch_ready(self) -> None:
        """Read from the workers' journals when they announce themselves, without any broker."""
        while True:
            for slot in self.slots:
                if (
                    slot.is_alive
                    and not slot.is_up
                    and has_announced(self._journal_of(slot.role, slot.pid))
                ):
                    slot.ready = True
                    self.journal.write(
                        Ready(now(), slot.role, slot.number, slot.pid, now() - slot.began)
                    )
            await asyncio.sleep(WATCH_S)

    def _journal_of(self, role: str, pid: int) -> Path:
        return self.folder / "workers" / f"{role}-{pid}.jsonl"

    async def _watch_memory(self) -> None:
        while True:
            for slot in self.slots:
                if slot.is_alive and (rss_mib := _rss_mib(slot.pid)):
                    self.journal.write(MemorySample(now(), slot.role, slot.pid, rss_mib))
            await asyncio.sleep(MEMORY_S)

    # -- the end ----------------------------------------------------------------------------

    async def take_snapshots(self, timeout_s: float = 5.0) -> list[Snapshot]:
        """Have each worker take a snapshot of its resources; return those that arrived in time."""
        began = now()
        waiting = {s.pid: s.role for s in self._runs if s.is_up and s.role != ACTUATOR}
        for pid in waiting:
            os.kill(pid, signal.SIGUSR2)
        snapshots: dict[int, Snapshot] = {}
        while len(snapshots) < len(waiting) and now() < began + timeout_s:
            await asyncio.sleep(WATCH_S)
            for pid, role in waiting.items():
                for event in read_events(self._journal_of(role, pid)):
                    if isinstance(event, Snapshot) and event.t >= began:
                        snapshots[pid] = event
        return list(snapshots.values())

    async def take_least_snapshots(self) -> list[Snapshot]:
        """Return the fewest tasks of each worker in several snapshots, with its last snapshot.

        Work that a worker does at intervals has tasks, too, and is no leak.
        """
        snapshots = await self.take_snapshots()
        for _ in range(NUM_SNAPSHOTS - 1):
            earlier = {snapshot.pid: snapshot for snapshot in snapshots}
            await asyncio.sleep(SNAPSHOT_PAUSE_S)
            snapshots = []
            for latest in await self.take_snapshots():
                fewest = min(latest, earlier.get(latest.pid, latest), key=lambda each: each.tasks)
                tasks, names = fewest.tasks, fewest.task_names
                snapshots.append(replace(latest, tasks=tasks, task_names=names))
        return snapshots

    async def stop(self) -> None:
        """Drain all processes, then stop the brokers; exit codes are in the journal."""
        self._keeps_running = False
        for slot in self.slots:
            if slot.is_alive and slot.process is not None:
                slot.expected_exit = True
                self.resume(slot.pid)
                slot.process.terminate()
        runs = list(self._runs.values())
        if runs:
            await asyncio.wait(runs, timeout=EXIT_TIMEOUT_S)
        for slot in self.slots:
            if slot.is_alive and slot.process is not None:
                slot.process.kill()
        for task in [*runs, *self._tasks]:
            task.cancel()
        await asyncio.gather(*runs, *self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.brokers.stop)


def has_announced(journal: Path) -> bool:
    """Return whether the worker that writes this journal is ready."""
    events = read_events(journal)
    return any(isinstance(event, WorkerEvent) and event.step == "ready" for event in events)


def worker_command(role: str, config: Path, url: str, fake: bool, step_ms: float) -> list[str]:
    """Return the command line of a watched worker."""
    command = [sys.executable, "-m", WORKER_MODULE, STAGE_ROLES.get(role, role)]
    command += ["--config", str(config), "--nats", url]
    command += ["--stage", role] if role in STAGE_ROLES else []
    return [*command, "--fake", "--step-ms", str(step_ms)] if fake else command


def _rss_mib(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return 0.0
