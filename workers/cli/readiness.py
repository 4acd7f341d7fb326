"""Waits until the workers of a local cluster are ready, for as long as they show signs of life."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.protocol.messages import Heartbeat, StartReport
from workers.cli.process_usage import usage_of
from workers.cli.start_watch import Observation, Show, StartWatch
from workers.roles import WorkerSpec

POLL_S = 0.1


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...


class Quiet:
    """Shows nothing."""

    def ready(self, title: str, after_s: float) -> None:
        pass

    def progress(self, title: str, text: str) -> None:
        pass


async def wait_ready(
    bus: Bus,
    specs: Sequence[WorkerSpec],
    processes: Mapping[int, Process],
    silence_s: float,
    show: Show,
) -> list[Heartbeat]:
    """Return the workers' heartbeats as soon as each of `specs` has one.

    `processes` has their processes by number, and changes while they start. Raises Unavailable when
    no worker that is not ready has shown a sign of life for `silence_s`.
    """
    loop = asyncio.get_running_loop()
    watch = StartWatch(specs, silence_s, show, loop.time())
    while True:
        beats, reports = await read_signs(bus)
        by_pid = {beat.pid: beat for beat in beats}
        own = {
            number: by_pid[process.pid]
            for number, process in processes.items()
            if process.pid in by_pid and by_pid[process.pid].role == specs[number].role
        }
        watch.observe(
            loop.time(),
            {
                number: _observe(process, own.get(number), reports)
                for number, process in processes.items()
            },
        )
        if watch.is_complete:
            return list(own.values())
        if (reason := watch.why_stalled(loop.time())) is not None:
            raise Unavailable(reason)
        # Readiness is an event of other processes, so the loop has to poll.
        await asyncio.sleep(POLL_S)


async def read_signs(bus: Bus) -> tuple[list[Heartbeat], list[StartReport]]:
    """Return all heartbeats and the reports of workers without one; none before the stream is."""
    try:
        return await bus.read_heartbeats(), await bus.read_start_reports()
    except Unavailable:
        return [], []


def _observe(
    process: Process, beat: Heartbeat | None, reports: Sequence[StartReport]
) -> Observation:
    return Observation(
        exit_code=process.returncode,
        is_ready=beat is not None and process.returncode is None,
        report=next((report for report in reports if report.pid == process.pid), None),
        usage=usage_of(process.pid),
    )
