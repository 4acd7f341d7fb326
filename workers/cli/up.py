"""Implementation of `pagemill up`: all roles on this machine until a signal drains them."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from shared.bus.login import without_credentials
from shared.config.schema import Config
from shared.errors import PagemillError
from shared.stage.signals import has_terminal
from shared.telemetry import logs
from workers.cli.start_display import StartDisplay
from workers.cli.terminal import call_on_signals, errors
from workers.supervisor import log_file
from workers.supervisor.cluster import LocalCluster

# Errors of the log that are shown when the start fails.
NUM_REASONS = 5


async def run_until_stopped(cluster: LocalCluster, config: Config) -> int:
    """Run the cluster and return the exit code. Raises ConfigError or Unavailable at the start."""
    file = cluster.log_file
    display = StartDisplay(errors, live=errors.is_terminal and file is not None)
    with _logging_to(file, config.log_level):
        if file is not None:
            display.say(f"logs are appended to {file}; `pagemill logs` shows them")
        offset = log_file.size_of(file)
        cluster.show = display
        try:
            return await _run(cluster, display)
        except PagemillError:
            for event in log_file.errors_since(file, offset)[-NUM_REASONS:]:
                display.say(event)
            raise
        finally:
            display.close()


async def _run(cluster: LocalCluster, display: StartDisplay) -> int:
    stopping = asyncio.Event()

    def stop_or_requeue() -> None:
        if stopping.is_set():
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
            display.say(
                f"ready at {without_credentials(cluster.url)} and {cluster.gateway_url};"
                " Ctrl-C drains and stops",
                "bold green",
            )
            await stop
        display.say("draining …")
    finally:
        ticks.cancel()
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError, PagemillError):
            await start
        await cluster.stop()
    return 0


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
