"""Reports of a starting worker: its current step, and the bytes of weights that it has read.

They are published from the event loop while a thread loads the model. A thread that holds the
interpreter delays them, so a worker without reports is not necessarily dead.
"""

import asyncio
import os
from collections.abc import Callable

import structlog
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol.encoding import to_json
from shared.protocol.messages import StartReport

_log = structlog.get_logger()

REPORT_S = 1.0
LAST_REPORT_S = 2.0

Measure = Callable[[], tuple[int, int] | None]
"""Returns the bytes that a step has read, and their total number. It runs in a thread."""
SetStep = Callable[[str], None]


def ignore_step(_: str) -> None:
    """The `SetStep` of a loader outside of a worker."""


class StartReporter:
    """Publisher of the reports of one worker."""

    def __init__(
        self, bus: Bus, role: str, worker: str, model: str | None, stage: str, version: str
    ) -> None:
        self._bus = bus
        self._report = StartReport(
            role, worker, version, os.getpid(), "", model=model or "", stage=stage
        )
        self._step: tuple[str, Measure | None] = ("starting", None)
        self._task: asyncio.Task[None] | None = None

    def set_step(self, name: str, measure: Measure | None) -> None:
        self._step = (name, measure)

    def start(self) -> None:
        self._task = asyncio.create_task(self._publish())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def refuse(self, reason: str) -> None:
        """Publish the last report, of a worker that refuses its configuration or its model."""
        self.stop()
        report = replace(self._report, step="refused", refused=reason)
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                await self._bus.heartbeats.publish_start(report.worker, to_json(report))
        except (PagemillError, TimeoutError) as error:
            _log.info("start_report_failed", error=str(error))

    async def _publish(self) -> None:
        report = self._report
        while True:
            step, measure = self._step
            try:
                done = None if measure is None else await asyncio.to_thread(measure)
                num_done, num_total = done or (0, 0)
                now = replace(report, step=step, done_bytes=num_done, total_bytes=num_total)
                await self._bus.heartbeats.publish_start(report.worker, to_json(now))
            except Exception as error:
                # The broker is unreachable, or older than these reports.
                _log.info("start_report_failed", error=str(error))
            await asyncio.sleep(REPORT_S)
