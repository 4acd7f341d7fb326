"""The life of a worker process: connect, become ready, serve, drain, exit.

A worker is crash-only: no other process needs the state of a worker that has died.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

from shared.blobs.server import host_id
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.config.schema import Config
from shared.errors import ConfigError, PagemillError, Unavailable
from shared.helpers import sandbox
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.versions import readable
from shared.stage import signals
from shared.stage.common_settings import compare_settings
from shared.stage.listeners import Listeners
from shared.stage.pipelines import default_stage, pipelines_of
from shared.stage.probes import new_probes
from shared.stage.reloading import Reloader
from shared.stage.stage import Stage
from shared.stage.start_reports import Measure, StartReporter
from shared.telemetry import logs
from shared.telemetry.metrics import Metrics
from shared.telemetry.prometheus import MetricsEndpoint
from shared.tenants.storage_quotas import StorageQuotas

HEARTBEAT_S = 1.0
# Longer than any election in the broker, which stores each heartbeat in a stream. After this time
# without a stored heartbeat, the broker has lost its streams, or cannot write.
UNHEARD_S = 20.0
# Interval of a draining worker's checks for payloads that no other worker has fetched.
PINNED_POLL_S = 0.1
# Number of heartbeats between synchronizations. Clocks drift by less than 1 ms in this time.
CLOCK_BEATS = 10

VERSION = version("pagemill")

# Limit of Linux on the length of a process name.
MAX_COMM = 15

# EX_CONFIG of sysexits.h. A restarted worker would end in the same way.
EXIT_CONFIG = 78


class Shutdown:
    """Shutdown of a worker: the event `asked` begins the drain, and `hurry` ends it at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self._began_s = 0.0

    def begin(self) -> None:
        """Begin the drain, unless it has begun."""
        if not self.asked.is_set():
            self._began_s = asyncio.get_running_loop().time()
            self.asked.set()

    def signal(self) -> None:
        """Begin the drain at the first call, and end it at the second."""
        if self.asked.is_set():
            self.hurry.set()
        self.begin()

    def has_time(self, drain_s: float) -> bool:
        """Return whether a drain of at most `drain_s` may still continue."""
        ends_s = self._began_s + drain_s
        return not self.hurry.is_set() and asyncio.get_running_loop().time() < ends_s

    async def drained(self, running: set[asyncio.Task[None]], drain_s: float) -> None:
        """Wait until all tasks are done, `drain_s` have passed, or `hurry` is set."""
        if not running:
            return
        done = asyncio.create_task(asyncio.wait(running, timeout=drain_s))
        hurried = asyncio.create_task(self.hurry.wait())
        await asyncio.wait({done, hurried}, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        hurried.cancel()


class Context:
    """Argument of a role's `main`: configuration, bus, identity, and shutdown."""

    def __init__(
        self,
        role: str,
        worker: str,
        model: str | None,
        config: Config,
        bus: Bus,
        log: logs.Logger,
        stage: str | None = None,
        listeners: Listeners | None = None,
        pool: str | None = None,
    ) -> None:
        """`stage` is the name of the stage to serve. If it is None, `default_stage` chooses it.

        `listeners` has the sockets that are bound already.
        """
        self.role = role
        self.worker = worker
        self.model = model
        """The model to serve, for a role whose workers serve one model each."""
        self.pool = pool
        """The pool of the worker, in a model that has several."""
        self.config = config
        self.bus = bus
        self.log = log
        self.url: str | None = None
        """URL of a gateway, which every heartbeat reports."""
        self.metrics = Metrics(role, worker)
        self.pipelines = pipelines_of(config)
        self.stage = Stage(
            bus,
            stage or default_stage(self.pipelines, role, model),
            worker,
            VERSION,
            config.delivery,
            self.metrics,
            self.pipelines,
        )
        bus.queues.on_tasks_lost(self.stage.claims.record_again)
        self.quotas = StorageQuotas(bus)
        self.shutdown = Shutdown()
        self.reloader = Reloader(config, None, log)
        self.listeners = listeners or Listeners(config)
        self.may_have_work = False
        """Whether a signal begins a drain. Otherwise it ends the process at once."""
        self._blobs: Blobs | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._heard_s = 0.0
        """Time of the event loop at which the broker stored the last heartbeat."""
        self._start_reporter = StartReporter(
            bus, role, worker, model, self._own_stage_name, VERSION
        )

    @property
    def _own_stage_name(self) -> str:
        """The name of the stage; empty if it equals the name of the role."""
        return "" if self.stage.name == self.role else self.stage.name

    def start_reports(self) -> None:
        """Report the current step of the start every second until `ready`."""
        self._start_reporter.start()

    async def refuse(self, reason: str) -> None:
        """Report why this worker does not serve, unless it has been ready."""
        if self._heartbeat is None:
            await self._start_reporter.refuse(reason)

    def step(self, name: str, measure: Measure | None = None) -> None:
        """Set the displayed name of the current step of the start. Any thread may call this.

        `measure` returns the bytes that the step has read and their total number, or None.
        """
        self._start_reporter.set_step(name, measure)

    async def open_metrics(self) -> None:
        """Open the metrics listener, which also answers `/health` and `/ready`.

        Raises Unavailable or ConfigError if no port can be opened.
        """
        stage = self.stage.name
        self.metrics.set_function("info", lambda: 1.0, version=VERSION, stage=stage)
        started_s = self.bus.now_ms() / 1000
        self.metrics.set_function("start_time_seconds", lambda: started_s)
        await self.bus.add_responder(subjects.METRICS, lambda _: to_json(self.metrics.snapshot()))
        if (listener := self.listeners.take("metrics")) is not None:
            self._endpoint = MetricsEndpoint(
                lambda: self.metrics.snapshot().series,
                listener,
                new_probes(self.role, self.worker, VERSION, self._read_status),
            )
            self.log.info("metrics", address=self._endpoint.address)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """The address of the metrics listener, if there is one."""
        return None if self._endpoint is None else self._endpoint.address

    def _read_status(self) -> str:
        """Return `ok` if this worker accepts work, or the reason why it does not."""
        if self.shutdown.asked.is_set():
            return "draining"
        if self._heartbeat is None:
            return "starting"
        if not self.bus.is_connected:
            return "no broker"
        if self.bus.queues.outages.is_open:
            return "no queue"
        unheard_s = asyncio.get_running_loop().time() - self._heard_s
        return "ok" if unheard_s < UNHEARD_S else "no streams"

    def log_sandbox(self) -> None:
        """Log the layers that the sandbox of this worker's processes lacks."""
        if layers := sandbox.missing():
            self.log.warning("sandbox_incomplete", missing=layers)

    async def open_blobs(self) -> Blobs:
        """Open the payload store of this worker. Its heartbeats publish the address.

        Raises Unavailable or ConfigError if its port cannot be opened.
        """
        self._blobs = Blobs(self.bus, self.role, self.worker, self.config.blobs)
        await self._blobs.start(self.listeners.take("blobs"))
        self.stage.blobs = self._blobs
        self.bus.queues.on_tasks_lost(self._blobs.release_all)
        return self._blobs

    async def drain_blobs(self) -> None:
        """Wait until other workers have fetched the payloads that were made for them.

        Otherwise the payloads would have to be made again. The wait ends with the time of the
        drain, or when no worker that reads them is alive.
        """
        drain_s, blobs = self.config.delivery.drain_s, self._blobs
        while blobs is not None and blobs.num_pinned and self.shutdown.has_time(drain_s):
            if not await self._has_readers():
                return
            await asyncio.sleep(PINNED_POLL_S)

    async def _has_readers(self) -> bool:
        """Return whether a worker is alive that reads payloads of this stage."""
        readers = {
            (reader, model)
            for model, pipeline in self.pipelines.items()
            for reader in pipeline.readers_of(self.stage.name)
        }
        try:
            beats = await self.bus.heartbeats.read()
        except Unavailable:
            return False
        return any((b.stage or b.role, model) in readers for b in beats for model in b.models)

    async def close(self) -> None:
        self._start_reporter.stop()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._blobs is not None:
            await self._blobs.close()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
        self.listeners.close()

    def ready(self, models: list[str], load: Callable[[], dict[str, float]]) -> None:
        """Begin the heartbeats of this worker. Each of them reports `load`."""
        self.may_have_work = True
        self.log.info("ready", models=models)
        self._start_reporter.stop()
        self._heard_s = asyncio.get_running_loop().time()
        self._heartbeat = asyncio.create_task(self._beat(models, load))

    async def _beat(self, models: list[str], load: Callable[[], dict[str, float]]) -> None:
        for count in itertools.count():
            reported = load() | self.stage.counters.load()
            if self.bus.queues.outages.is_open:
                reported["refused"] = 1.0
            if self._blobs is not None:
                reported |= self._blobs.load()
            beat = Heartbeat(
                role=self.role,
                worker=self.worker,
                version=VERSION,
                pid=os.getpid(),
                models=models,
                load=reported,
                blobs=None if self._blobs is None else self._blobs.address,
                metrics=self.metrics_address,
                url=self.url,
                stage=self._own_stage_name,
                reads=readable(),
                host=host_id(),
                pool=self.pool or "",
                hostname=socket.gethostname(),
            )
            try:
                await self.bus.heartbeats.publish(self.worker, to_json(beat))
                self._heard_s = asyncio.get_running_loop().time()
                if count % CLOCK_BEATS == CLOCK_BEATS - 1:
                    await self.bus.connection.sync_clock()
                    self.bus.queues.check()
            except Exception as error:
                # The broker is unreachable. The connection waits for it.
                self.log.warning("heartbeat_failed", error=str(error))
            await asyncio.sleep(HEARTBEAT_S)


Main = Callable[[Context], Awaitable[None]]


def _name_process(name: str) -> None:
    """Set the name in `ps` and `top`. A forked worker shows the arguments of its supervisor."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:MAX_COMM], encoding="ascii")


async def run(
    role: str,
    main: Main,
    config: Config,
    server: Login | str,
    model: str | None,
    stage: str | None,
    reread: Callable[[], Config] | None = None,
    listeners: Listeners | None = None,
    pool: str | None = None,
) -> int:
    """Run one worker until it has stopped, and return the exit code of the process.

    `stage` is the name of the stage to serve. If it is None, `default_stage` chooses it. `reread`
    returns the current configuration for a reload, or raises ConfigError. `listeners` has the
    sockets that are bound already.
    """
    signals.end_at_once()
    worker = f"{role}-{secrets.token_hex(4)}"
    _name_process(worker)
    log = logs.configure_logging(config.log_level, role=role, worker=worker)
    try:
        _check_model(config, model)
        bus = await Bus.connect(server, worker, config.nats.connect_timeout_s)
    except PagemillError as error:
        log.error("not_started", code=error.code, reason=error.message)
        return _exit_code(error)
    context = Context(role, worker, model, config, bus, log, stage, listeners, pool)
    context.reloader = Reloader(config, reread, log)
    try:
        _drain_on_signals(context)
        await bus.streams.prepare(config.nats, config.delivery, config.agent, config.batch)
        context.start_reports()
        await compare_settings(bus, worker, config, log)
        await context.open_metrics()
        await main(context)
        await context.drain_blobs()
    except PagemillError as error:
        log.error("stopped", code=error.code, reason=error.message)
        if isinstance(error, ConfigError):
            await context.refuse(error.message)
        return _exit_code(error)
    finally:
        signals.ignore()
        with contextlib.suppress(Exception):
            await context.close()
            await bus.close()
    log.info("drained")
    return 0


def _check_model(config: Config, model: str | None) -> None:
    if model is not None and model not in config.models:
        models = ", ".join(sorted(config.models))
        raise ConfigError(f"no model {model!r} is configured; configured: {models}", field="model")


def _exit_code(error: PagemillError) -> int:
    return EXIT_CONFIG if isinstance(error, ConfigError) else 1


def _drain_on_signals(context: Context) -> None:
    """Begin the drain at a SIGTERM or SIGINT, and hurry it at a second one.

    A closed terminal also begins the drain. It does not hurry it, because the shell and the kernel
    both send SIGHUP. Without a terminal, SIGHUP reloads the configuration.
    """
    loop = asyncio.get_running_loop()

    def call(act: Callable[[], None]) -> None:
        if not context.may_have_work:
            signals.exit_now()
        loop.call_soon_threadsafe(act)

    shutdown = context.shutdown
    signals.set_handlers(
        lambda: call(shutdown.signal),
        lambda: call(shutdown.begin),
        lambda: loop.call_soon_threadsafe(context.reloader.reload),
    )
