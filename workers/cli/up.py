"""Implementation of `pagemill up`: all roles on this machine until a signal drains them, or until
some work is done."""

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal

from shared.bus.login import without_credentials
from shared.config.schema import Config
from shared.errors import PagemillError
from shared.protocol.pipeline import AUDIO, TEXT
from shared.stage.pipelines import pipelines_of
from shared.stage.runtime import EXIT_CONFIG
from shared.stage.signals import has_terminal
from shared.telemetry import logs
from workers import settings
from workers.cli.start_display import StartDisplay
from workers.cli.terminal import EXIT_INTERRUPTED, call_on_signals, errors
from workers.roles import WorkerSpec
from workers.supervisor import log_file
from workers.supervisor.cluster import LocalCluster

# Errors of the log that are shown when the start fails.
NUM_REASONS = 5

Work = Callable[[], Awaitable[int]]


async def run_until_stopped(cluster: LocalCluster, config: Config, work: Work | None = None) -> int:
    """Run the cluster and return the exit code. Raises ConfigError or Unavailable at the start.

    With `work`, the cluster also stops when this has ended, and its exit code is returned. A signal
    cancels it.
    """
    file = cluster.log_file
    display = StartDisplay(errors, live=errors.is_terminal and file is not None)
    with _logging_to(file, config.log_level):
        if file is not None:
            display.say(f"logs are appended to {file}; `pagemill logs` shows them")
        offset = log_file.size_of(file)
        cluster.show = display
        if file is not None:
            cluster.when_ended = WorkerEnds(display).show
        try:
            return await _run(cluster, config, display, work)
        except PagemillError:
            for event in log_file.errors_since(file, offset)[-NUM_REASONS:]:
                display.say(event)
            raise
        finally:
            display.close()


class WorkerEnds:
    """Lines about workers that end, which are otherwise only in the log."""

    def __init__(self, display: StartDisplay) -> None:
        self._display = display
        self._refusals: set[str] = set()

    def show(self, worker: WorkerSpec, code: int) -> None:
        """Say that a worker has ended. A refusal is said once, though it is tried again."""
        place = " of ".join(filter(None, (worker.stage or worker.role, worker.model)))
        if code != EXIT_CONFIG:
            how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
            self._display.say(f"{place} has ended {how}; another process takes over", "yellow")
        elif place not in self._refusals:
            self._refusals.add(place)
            text = f"{place} refuses its configuration or model; `pagemill logs` says why"
            self._display.say(text, "bold red")


async def _run(
    cluster: LocalCluster, config: Config, display: StartDisplay, work: Work | None
) -> int:
    stopping, code = asyncio.Event(), 0 if work is None else EXIT_INTERRUPTED

    def stop_or_requeue() -> None:
        if stopping.is_set():
            display.say("the requests in flight continue at the next start")
            cluster.supervisor.requeue_now()
        stopping.set()

    # Without a terminal, SIGHUP comes from a service manager, and requests a reload.
    on_hangup = stopping.set if has_terminal() else cluster.supervisor.reload
    call_on_signals(stop_or_requeue, on_hangup=on_hangup)
    display.open()
    ticks = asyncio.create_task(display.keep_current())
    start = asyncio.create_task(cluster.start())
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        ticks.cancel()
        display.close()
        if start.done():
            start.result()
            addresses = (without_credentials(cluster.url), cluster.gateway_url)
            where = " and ".join(filter(None, addresses))
            for name, model in config.models.items():
                if model.description:
                    display.say(f"{name}: {model.description}")
            ready = f"ready at {where}"
            display.say(ready if work else f"{ready}; Ctrl-C drains and stops", "bold green")
            if work is None:
                file = cluster.processes.config_file
                display.say(next_step(config, file, addresses[0], addresses[1]))
            code = await _until(stop, work)
        display.say("draining: requests in flight end first; Ctrl-C again keeps them for later")
    finally:
        ticks.cancel()
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError, PagemillError):
            await start
        await cluster.stop()
    return code


def next_step(config: Config, file: Path | None, url: str, page: str | None) -> str:
    """Return the line with the command to type next.

    `file` is the configuration file, `url` the broker, and `page` the URL of the gateway.
    """
    pipelines = pipelines_of(config)
    writers = [name for name, pipeline in pipelines.items() if TEXT in pipeline.outputs]
    speaks = any(pipeline.output_of(AUDIO) for pipeline in pipelines.values())
    command = 'say "Good morning."' if speaks else 'draw "a red circle on blue"'
    if writers:
        command = "chat" if len(writers) == 1 else f"chat --model {shlex.quote(writers[0])}"
    files = (settings.DEFAULT_FILE.absolute(), settings.find_running_file())
    if file is not None and file.absolute() not in files:
        command += f" -c {shlex.quote(str(file))}"
    urls = (settings.nats_url(config), f"nats://127.0.0.1:{settings.find_running_port()}")
    if url not in map(without_credentials, urls):
        command += f" --nats {url}"
    browser = f"or open {page}" if page else ""
    lines = ["next, in another terminal in this folder:", f"  {_activation()}pagemill {command}"]
    return "\n".join(filter(None, [*lines, browser]))


def _activation() -> str:
    """Return the command that a new terminal needs before `pagemill` is found in it."""
    scripts = Path(sys.prefix) / "bin"
    others = os.pathsep.join(p for p in os.get_exec_path() if Path(p) != scripts)
    if not (scripts / "activate").exists() or shutil.which("pagemill", path=others):
        return ""
    here = Path.cwd()
    place = scripts.relative_to(here) if scripts.is_relative_to(here) else scripts
    return f". {shlex.quote(str(place / 'activate'))} && "


async def _until(stop: "asyncio.Task[Literal[True]]", work: Work | None) -> int:
    """Wait until a signal arrives or the work has ended, and return the exit code."""
    if work is None:
        await stop
        return 0
    working = asyncio.ensure_future(work())
    try:
        await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
    try:
        return await working
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED


@contextlib.contextmanager
def _logging_to(file: Path | None, level: logs.Level) -> Iterator[None]:
    """Write the log of this process to the file of the workers, too."""
    if file is None:
        logs.configure_logging(level, role="up")
        yield
        return
    with log_file.open_for_append(file) as fd:
        logs.configure_logging(level, fd, role="up")
        yield
