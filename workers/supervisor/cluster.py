"""Local cluster: an embedded broker and a process for each worker, with restarts and drain."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path

import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer, become_child
from shared.bus.local_keys import forget_keys
from shared.config.schema import Config
from shared.errors import ConfigError, PagemillError, Unavailable
from shared.helpers.task_set import TaskSet
from shared.protocol.messages import WorkerSlot
from shared.stage.runtime import EXIT_CONFIG
from workers.roles import WorkerSpec, role_of
from workers.settings import login_of, nats_url
from workers.supervisor.broker import repair_broker, start_embedded
from workers.supervisor.log_file import open_for_append
from workers.supervisor.preloader import ForkedProcess, Preloader
from workers.supervisor.start import Quiet, Show, Watched, titles_of, wait_ready

_log = structlog.get_logger()

BROKER_CHECK_S = 0.2
FIRST_RESTART_S = 0.5
MAX_RESTART_S = 10.0
# Time beyond the drain before a worker is killed.
STOP_GRACE_S = 5.0

Process = asyncio.subprocess.Process | ForkedProcess


@dataclass(eq=False)
class LocalCluster:
    """Owner of the broker, unless a URL is configured, and of the worker processes."""

    _config: Config
    _config_file: Path | None
    """File of the configuration, which each worker reads itself; None stands for the default."""
    _specs: list[WorkerSpec]
    configured_url: InitVar[str | None] = None
    """URL of the broker; by default that of the configuration."""
    log_file: Path | None = None
    gateway_url: str | None = None
    """URL of a gateway of this cluster, once it is ready."""
    show: Show = field(default_factory=Quiet)
    """Receiver of the progress of the start."""
    preloader: Preloader | None = None
    """The process that workers which use torch are forked from; by default they are executed."""
    follow: Callable[[Bus], Awaitable[None]] | None = None
    """Scales pools of workers over a connection, until it is cancelled."""
    when_ready: Callable[[Bus], Awaitable[None]] | None = None
    """Starts further workers over a connection, once all others are ready."""
    _broker: EmbeddedServer | None = None
    _supervisors: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The tasks that keep workers running, by worker number."""
    _others: list[asyncio.Task[None]] = field(default_factory=list)
    _draining: set[int] = field(default_factory=set)
    _ending: TaskSet = field(default_factory=TaskSet)
    _refused: asyncio.Future[None] | None = None
    _processes: dict[int, Process] = field(default_factory=dict)
    _watched: dict[int, Watched] = field(default_factory=dict)
    """The processes that the start observes, by worker number.

    For a worker that has not been forked yet, this is the preloader, which imports its modules.
    """

    def __post_init__(self, configured_url: str | None) -> None:
        self.url = configured_url or (nats_url(self._config) if self._config.nats.url else "")
        # Otherwise workers read it from the configuration: arguments show in `ps`, and it may have
        # a password.
        self.passes_url = configured_url is not None or not self.url

    async def start(self) -> None:
        """Start everything; returns when every worker has announced that it is ready.

        Raises ConfigError or Unavailable when a worker cannot become ready.
        """
        for title in titles_of(self._specs):
            self.show.progress(title, "starting")
        if not self.url:
            self._broker = await asyncio.to_thread(start_embedded, self._config)
            self.url = self._broker.url
            await self._fit_streams()
            self._others.append(asyncio.create_task(self._supervise_broker(self._broker)))
            repair = partial(repair_broker, config=self._config, broker=self._broker)
            self._others.append(asyncio.create_task(self._keep(repair, "broker_repair")))
        self._refused = asyncio.get_running_loop().create_future()
        for number in range(len(self._specs)):
            self._start_supervisor(number)
        if self.follow is not None:
            self._others.append(asyncio.create_task(self._keep(self.follow, "actuator")))
        ready = asyncio.create_task(self._wait_ready())
        try:
            await asyncio.wait({ready, self._refused}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                self._refused.result()
            await ready
        finally:
            # The task has a connection, which would log the end of the broker as a loss.
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        if self.when_ready is not None:
            self._others.append(asyncio.create_task(self._keep(self.when_ready, "starter")))

    async def _fit_streams(self) -> None:
        """Change the streams of the embedded broker to the configuration, as `pagemill migrate`.

        A limit that has no room for all that is stored is left to that command.
        """
        bus = await self._connect("migrate")
        try:
            config = self._config
            bus.configure_streams(config.nats, config.delivery, config.agent)
            changes = await bus.find_stream_changes(bus.now_ms())
            kept = [change for change in changes if change.shrinks]
            # A coordinator creates those that are missing.
            fitting = [c for c in changes if c.difference.setting and not c.shrinks]
            await bus.change_streams(fitting)
        except Unavailable as error:
            _log.warning("streams_not_compared", reason=error.message)
            return
        finally:
            await bus.close()
        for change in kept:
            _log.warning(
                "stream_not_shrunk",
                stream=change.difference.stream,
                setting=change.difference.setting,
                effect=change.effect,
                hint="pagemill migrate --shrink",
            )

    async def _connect(self, name: str) -> Bus:
        login = login_of(self._config, given_url=self.url if self.passes_url else None)
        return await Bus.connect(login, name, self._config.nats.connect_timeout_s)

    def pids(self, role: str) -> list[int]:
        """Return the process ids of the running workers of a role."""
        return [
            process.pid
            for number, process in self._processes.items()
            if self._specs[number].role == role and process.returncode is None
        ]

    # -- pools ----------------------------------------------------------------------------------

    def slots(self, spec: WorkerSpec) -> list[WorkerSlot]:
        """Return the workers of this kind that run, start or drain."""
        found = []
        for number in self._supervisors:
            if self._specs[number] == spec:
                process = self._processes.get(number)
                pid = 0 if process is None or process.returncode is not None else process.pid
                found.append(WorkerSlot(number, pid, number in self._draining))
        return found

    def add_worker(self, spec: WorkerSpec) -> None:
        """Start a further worker."""
        self._specs.append(spec)
        self._start_supervisor(len(self._specs) - 1)

    def drain_worker(self, number: int) -> None:
        """Drain a worker, which is not replaced. It is killed when its drain takes too long."""
        self._draining.add(number)
        process = self._processes.get(number)
        if process is not None and process.returncode is None:
            self._end_later(process)

    def _end_later(self, process: Process) -> None:
        process.terminate()
        self._ending.start(_end(process, self._patience_s))

    def _start_supervisor(self, number: int) -> None:
        task = asyncio.create_task(self._supervise(number, self._specs[number]))
        self._supervisors[number] = task
        task.add_done_callback(lambda _: self._supervisors.pop(number, None))

    async def _keep(self, follow: Callable[[Bus], Awaitable[None]], name: str) -> None:
        while True:
            try:
                bus = await self._connect(name)
            except Unavailable as error:
                _log.warning(f"no_{name}", reason=error.message)
                await asyncio.sleep(FIRST_RESTART_S)
                continue
            try:
                await follow(bus)
            except PagemillError as error:
                _log.warning(f"no_{name}", reason=error.message)
                await asyncio.sleep(FIRST_RESTART_S)
            finally:
                await bus.close()

    @property
    def _patience_s(self) -> float:
        return self._config.delivery.drain_s + STOP_GRACE_S

    # -- end and supervision --------------------------------------------------------------------

    def requeue_now(self) -> None:
        """During `stop`: make the workers requeue at once the requests in flight."""
        for process in self._processes.values():
            if process.returncode is None:
                process.terminate()

    def reload(self) -> None:
        """Make the workers read their configuration again."""
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        """Drain all workers, then stop the broker."""
        tasks = [*self._supervisors.values(), *self._others, *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        alive = {n: p for n, p in self._processes.items() if p.returncode is None}
        for number, process in alive.items():
            # A second signal would make a worker requeue what it could finish.
            if number not in self._draining:
                process.terminate()
        await asyncio.gather(*(_end(process, self._patience_s) for process in alive.values()))
        if self.preloader is not None:
            self.preloader.close()
        if self._broker is not None:
            await asyncio.to_thread(self._broker.stop)
            forget_keys(self._broker.port)

    async def _supervise_broker(self, broker: EmbeddedServer) -> None:
        while True:
            await asyncio.sleep(BROKER_CHECK_S)
            if broker.has_exited:
                _log.warning("broker_ended", url=broker.url)
                try:
                    await asyncio.to_thread(broker.start)
                except PagemillError as error:
                    _log.error("broker_not_started", reason=error.message)

    async def _supervise(self, number: int, spec: WorkerSpec) -> None:
        """Run one worker, and start it again whenever it ends, until it is to drain."""
        loop = asyncio.get_running_loop()
        if self.preloader is not None and role_of(spec.role).can_be_forked:
            self._watched[number] = self.preloader
        pause_s = FIRST_RESTART_S
        while number not in self._draining:
            try:
                process = await self._spawn(spec)
            except (OSError, ConfigError) as error:
                _log.error(
                    "worker_not_started", role=spec.role, reason=str(error), retry_in_s=pause_s
                )
            else:
                self._processes[number] = self._watched[number] = process
                began = loop.time()
                if number in self._draining:
                    self._end_later(process)
                code = await process.wait()
                if code == EXIT_CONFIG and self._refused is not None and not self._refused.done():
                    self._refused.set_exception(
                        ConfigError(f"the {spec.role} refuses this configuration; its log says why")
                    )
                if loop.time() - began > MAX_RESTART_S:
                    pause_s = FIRST_RESTART_S
                if number in self._draining:
                    _log.info("worker_drained", role=spec.role, code=code)
                    del self._processes[number], self._watched[number]
                    break
                _log.warning("worker_ended", role=spec.role, code=code, restart_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RESTART_S)

    async def _spawn(self, spec: WorkerSpec) -> Process:
        arguments = ["worker", spec.role]
        if self.passes_url:
            arguments += ["--nats", self.url]
        if spec.model is not None:
            arguments.append(f"--model={spec.model}")  # It may begin with a hyphen.
        if spec.stage is not None:
            arguments += ["--stage", spec.stage]
        if self._config_file is not None:
            arguments += ["--config", str(self._config_file)]
        # With a group of its own, a worker does not receive Ctrl-C, which starts the drain here.
        # Without a file, a worker writes its log to the stderr of this process.
        log = (
            open_for_append(self.log_file)
            if self.log_file is not None
            else contextlib.nullcontext(sys.stderr.fileno())
        )
        with log as stderr:
            if self.preloader is not None and role_of(spec.role).can_be_forked:
                try:
                    return await self.preloader.start(arguments, stderr=stderr)
                except ConnectionError:
                    _log.warning("preloader_ended")
                    self.preloader = None
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "workers",
                *arguments,
                stderr=stderr,
                preexec_fn=become_child,
            )

    async def _wait_ready(self) -> None:
        """Raises Unavailable when the workers that are not ready show no sign of life any more."""
        bus = await self._connect("local")
        try:
            beats = await wait_ready(
                bus, self._specs, self._watched, self._config.start_silence_s, self.show
            )
        finally:
            await bus.close()
        self.gateway_url = next((beat.url for beat in beats if beat.url is not None), None)


async def _end(process: Process, patience_s: float) -> None:
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
