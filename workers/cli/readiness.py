"""Waits until the workers of a local cluster are ready, for as long as they show signs of life."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from shared.blobs.server import host_id
from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat, StartReport
from workers.cli.process_usage import usage_of
from workers.cli.start_watch import Observation, Show, StartWatch
from workers.roles import WorkerSpec

POLL_S = 0.1

Sign = TypeVar("Sign", Heartbeat, StartReport)


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
    host = host_id()
    while True:
        beats, reports = await read_signs(bus)
        here = [beat for beat in beats if beat.blobs is None or beat.blobs.host == host]
        own: dict[int, Heartbeat] = {}
        seen = {}
        for number, process in processes.items():
            role = specs[number].role
            if (beat := _find(here, process, role)) is not None:
                own[number] = beat
            seen[number] = Observation(
                exit_code=process.returncode,
                is_ready=beat is not None and process.returncode is None,
                report=_find(reports, process, role),
                usage=usage_of(process.pid),
            )
        watch.observe(loop.time(), seen)
        if watch.is_complete:
            return list(own.values())
        if (reason := watch.why_stalled(loop.time())) is not None:
            raise Unavailable(reason)
        # Readiness is an event of other processes, so the loop has to poll.
        await asyncio.sleep(POLL_S)


async def read_signs(bus: Bus) -> tuple[list[Heartbeat], list[StartReport]]:
    """Return the heartbeats of ready workers and the reports of workers that start.

    Both are empty until the first worker has created the stream that holds them.
    """
    try:
        # A read of a stream that does not exist is tried again for BROKER_DEADLINE_S.
        await bus.stream_size(subjects.WORKERS_STREAM)
        return await bus.read_heartbeats(), await bus.read_start_reports()
    except Unavailable:
        return [], []


def _find(signs: Sequence[Sign], process: Process, role: str) -> Sign | None:
    """Return the sign of life of a process.

    A process id alone is not enough: machines that share a broker use the same ids.
    """
    return next((sign for sign in signs if (sign.pid, sign.role) == (process.pid, role)), None)
