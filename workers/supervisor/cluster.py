"""Cluster of `pagemill up`: a broker, unless one is configured, and the workers on this machine."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.local_keys import forget_keys
from shared.config.schema import Config
from shared.errors import ConfigError, PagemillError, Unavailable
from shared.gpu.devices import Gpu
from shared.protocol import subjects
from shared.stage.runtime import EXIT_CONFIG
from workers.roles import AGENT, BATCHER, WorkerSpec, device_needs
from workers.settings import login_of, nats_url
from workers.supervisor.broker import (
    fit_streams,
    keep_running,
    repair_broker,
    start_embedded,
    watch_disk,
)
from workers.supervisor.gpus import WorkerPlaces
from workers.supervisor.preloader import Preloader
from workers.supervisor.processes import WorkerProcesses
from workers.supervisor.start import Quiet, Show, Watched, titles_of, wait_ready
from workers.supervisor.supervisor import Supervisor

_log = structlog.get_logger()

RETRY_S = 0.5
# Interval in which the queue is read, in case a notification was lost.
LOOK_S = 60.0
# Queues of the roles that most clusters never need: the stream, and the filter of its messages.
OPTIONAL_ROLES = {
    AGENT: (subjects.RESPONSES_STREAM, subjects.RESPONSES_FILTER),
    BATCHER: (subjects.BATCHJOBS_STREAM, subjects.BATCHJOBS_FILTER),
}


class LocalCluster:
    """Owner of the broker, unless a URL is configured, and of the supervised workers."""

    def __init__(
        self,
        config: Config,
        config_file: Path | None,
        workers: Sequence[WorkerSpec],
        configured_url: str | None = None,
        log_file: Path | None = None,
        *,
        preloader: Preloader | None = None,
        processes: WorkerProcesses | None = None,
        gpus: Sequence[Gpu] = (),
    ) -> None:
        """`configured_url` replaces the URL of the configuration. `gpus` are the GPUs of this
        machine, for the workers that need one."""
        self._config = config
        self._workers = list(workers)
        self.url = configured_url or (nats_url(config) if config.nats.url else "")
        self.log_file = log_file
        self.processes = processes or WorkerProcesses(
            config_file, log_file=log_file, preloader=preloader
        )
        self.processes.url = configured_url
        self.supervisor = Supervisor(
            self.processes, config.delivery.drain_s, self._on_ended, WorkerPlaces(config, gpus)
        )
        self.gateway_url: str | None = None
        """URL of a gateway of this cluster, once it is ready."""
        self.show: Show = Quiet()
        """Receiver of the progress of the start."""
        self.when_connectable: Callable[[], None] | None = None
        """Is called as soon as the broker accepts connections, before any worker starts."""
        self.follow: Callable[[Bus], Awaitable[None]] | None = None
        """Scales pools of workers over a connection, until it is cancelled."""
        self.when_ended: Callable[[WorkerSpec, int], None] | None = None
        """Is called with the exit code of a worker that ends after the start, and is replaced."""
        self.when_ready: Callable[[Bus], Awaitable[None]] | None = None
        """Starts further workers over a connection, once all others are ready."""
        self._broker: EmbeddedServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._refused: asyncio.Future[None] | None = None
        """Fails as soon as a worker refuses the configuration during the start."""

    async def start(self) -> None:
        """Start everything; returns when every worker has announced that it is ready.

        Raises ConfigError or Unavailable when a worker cannot become ready.
        """
        for title in titles_of(self._workers):
            self.show.progress(title, "starting")
        if not self.url:
            await self._start_broker()
        if self.when_connectable is not None:
            self.when_connectable()
        self._refused = asyncio.get_running_loop().create_future()
        for worker in self._workers:
            self.supervisor.add(worker)
        if self.follow is not None:
            self._connect_for("actuator", self.follow)
        ready = asyncio.create_task(self._wait_ready())
        try:
            await asyncio.wait({ready, self._refused}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                self._refused.result()
            await ready
        finally:
            if not self._refused.cancel():
                self._refused.exception()
            self._refused = None
            # The task has a connection, which would log the end of the broker as a loss.
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        if self.when_ready is not None:
            self._connect_for("starter", self.when_ready)

    async def stop(self) -> None:
        """Drain all workers, then stop the broker."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.supervisor.stop()
        self.processes.close()
        if self._broker is not None:
            await asyncio.to_thread(self._broker.stop)
            forget_keys(self._broker.port)

    def pids(self, role: str) -> list[int]:
        """Return the process ids of the running workers of a role."""
        return self.supervisor.pids(role)

    def watched(self, slot: int) -> Watched | None:
        """Return the process that works on the start of a worker.

        Until the worker is forked, this is the preloader, which imports its modules.
        """
        if (process := self.supervisor.processes.get(slot)) is not None:
            return process
        worker = self._workers[slot]
        is_forked = device_needs(self._config, worker) is None and self.processes.forks(worker)
        return self.processes.preloader if is_forked else None

    async def _start_broker(self) -> None:
        broker = self._broker = await asyncio.to_thread(start_embedded, self._config)
        self.url = self.processes.url = broker.url
        try:
            bus = await self._connect("migrate")
            try:
                await fit_streams(bus, self._config)
            finally:
                await bus.close()
        except Unavailable as error:
            _log.warning("streams_not_compared", reason=error.message)
        self._tasks.append(asyncio.create_task(keep_running(broker)))
        repair = partial(repair_broker, config=self._config, broker=broker)
        self._connect_for("broker_repair", repair)
        self._connect_for("disk_watch", partial(watch_disk, config=self._config, broker=broker))

    def _on_ended(self, worker: WorkerSpec, code: int) -> None:
        if self._refused is None:
            if self.when_ended is not None:
                self.when_ended(worker, code)
        elif code == EXIT_CONFIG and not self._refused.done():
            self._refused.set_exception(
                ConfigError(f"the {worker.role} refuses this configuration; its log says why")
            )

    async def _connect(self, name: str) -> Bus:
        login = login_of(self._config, given_url=self.processes.url)
        return await Bus.connect(login, name, self._config.nats.connect_timeout_s)

    def _connect_for(self, name: str, work: Callable[[Bus], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(self._keep(name, work)))

    async def _keep(self, name: str, work: Callable[[Bus], Awaitable[None]]) -> None:
        """Run `work` over a connection, and again after each failure, until cancelled."""
        while True:
            try:
                bus = await self._connect(name)
            except Unavailable as error:
                _log.warning(f"no_{name}", reason=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await work(bus)
            except PagemillError as error:
                _log.warning(f"no_{name}", reason=error.message)
                await asyncio.sleep(RETRY_S)
            finally:
                await bus.close()

    async def _wait_ready(self) -> None:
        """Raise Unavailable when no worker that is not ready shows a sign of life any more."""
        bus = await self._connect("local")
        try:
            beats = await wait_ready(
                bus,
                self._workers,
                self.watched,
                self._config.start_silence_s,
                self.show,
            )
        finally:
            await bus.close()
        self.gateway_url = next((beat.url for beat in beats if beat.url is not None), None)


async def start_on_first_use(bus: Bus, supervisor: Supervisor) -> None:
    """Start an agent when the first response is queued, a batcher when the first batch is queued,
    and keep them. Never returns.

    Most clusters need neither, and the processes would cost them memory.
    """
    starting = [
        asyncio.create_task(_start_when_queued(bus, supervisor, role, *queue))
        for role, queue in OPTIONAL_ROLES.items()
    ]
    try:
        await asyncio.gather(*starting)
        await asyncio.Event().wait()
    finally:
        for task in starting:
            task.cancel()


async def _start_when_queued(
    bus: Bus, supervisor: Supervisor, role: str, stream: str, messages: str
) -> None:
    live = await bus.subscribe(messages)
    spec = WorkerSpec(role)
    while not supervisor.slots(spec):
        size, _ = await bus.figures.size(stream)
        if size:
            supervisor.add(spec)
        else:
            await live.next(LOOK_S)
    await bus.unsubscribe(live)
