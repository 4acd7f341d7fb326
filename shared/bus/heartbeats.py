"""Heartbeats and start reports: the workers that live, and the progress of those that start."""

import math
from typing import Protocol

from shared.bus.reading import StoredMessage
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat, StartReport, decode_heartbeat, decode_start_report

# Heartbeats come every second; a worker without one for this long counts as dead.
DEAD_AFTER_S = 3.0


class _Streams(Protocol):
    """The methods of `Bus` that heartbeats need."""

    async def publish_without_id(self, subject: str, data: bytes) -> None: ...
    async def read(self, stream: str, subject: str) -> list[StoredMessage]: ...
    async def read_last(self, stream: str, subject: str) -> StoredMessage | None: ...


class Heartbeats:
    """The latest reports of all workers, in a stream that keeps one message of each."""

    def __init__(self, bus: _Streams) -> None:
        self._bus = bus

    async def publish(self, worker: str, data: bytes) -> None:
        await self._bus.publish_without_id(subjects.heartbeat(worker), data)

    async def read(self, silent_s: float = DEAD_AFTER_S) -> list[Heartbeat]:
        """Return the latest heartbeat of every worker that has been silent for less than this time.

        By default, these are the live workers. The stream keeps heartbeats for `HEARTBEAT_TTL_S`.
        Undecodable messages are skipped, because any client may publish on the bus.
        """
        stored = await self._bus.read(subjects.WORKERS_STREAM, subjects.HEARTBEATS_FILTER)
        newest_ms = max((beat.stored_ms for beat in stored), default=0.0)
        latest = [b.data for b in stored if newest_ms - b.stored_ms <= 1000 * silent_s]
        return [beat for data in latest if (beat := decode_heartbeat(data)) is not None]

    async def publish_start(self, worker: str, data: bytes) -> None:
        await self._bus.publish_without_id(subjects.start_report(worker), data)

    async def read_starts(self) -> list[StartReport]:
        """Return the latest report of every live worker without a heartbeat."""
        return [report for report in await self._read_reports() if not report.refused]

    async def read_refusals(self) -> list[StartReport]:
        """Return the reports of workers that have refused their start in the last seconds.

        A report with process id 0 is of a coordinator, about all workers of a stage.
        """
        return [report for report in await self._read_reports() if report.refused]

    async def _read_reports(self) -> list[StartReport]:
        stored = await self._bus.read(subjects.WORKERS_STREAM, subjects.WORKERS_FILTER)
        newest_ms = max((message.stored_ms for message in stored), default=0.0)
        ready = {message.subject for message in stored}
        reports = [
            decode_start_report(message.data)
            for message in stored
            if newest_ms - message.stored_ms <= 1000 * DEAD_AFTER_S
            and message.subject == subjects.start_report(subjects.last_token(message.subject))
            and subjects.heartbeat(subjects.last_token(message.subject)) not in ready
        ]
        return [report for report in reports if report is not None]

    async def lag_s(self, worker: str, observer: str) -> float:
        """Return the time from the latest heartbeat of `worker` to the latest one of `observer`.

        Infinite for a worker without a stored heartbeat. During an outage of the broker no
        heartbeat is stored, so only a comparison with a live worker shows that a worker is dead.
        """
        last = await self._bus.read_last(subjects.WORKERS_STREAM, subjects.heartbeat(worker))
        own = await self._bus.read_last(subjects.WORKERS_STREAM, subjects.heartbeat(observer))
        if last is None:
            return math.inf
        return 0.0 if own is None else (own.stored_ms - last.stored_ms) / 1000
