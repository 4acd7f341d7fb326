"""The engines of a scaled pool, read from the journal of their actuator, and their faults."""

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import nats

from ops.chaos.history import Fault, ProcessExited, Ready, RecordReceived, Started, now, read_events
from ops.chaos.plan import MODEL, Scaled, Settings, make_requests
from ops.chaos.processes.nemesis import SIGNALS
from ops.chaos.processes.pool import Pool
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.state.log_records import is_final

WATCH_S = 0.1
# There is a pause between faults, so that each hits a pool at work.
PAUSE_S = 1.5
# Beyond `idle_s`, for processes that end on a busy machine; a check has the bound.
ZERO_TIMEOUT_S = 60.0
LISTENS_S = 2.5
ROLE = "engine"
LOST_LANE, OTHER_LANE = "batch", "interactive"


class ScaledEngines:
    """The engines of a pool. Injects faults into them and into other processes."""

    def __init__(self, folder: Path, pool: Pool, settings: Settings, scaled: Scaled) -> None:
        self._folder = folder
        self._pool = pool
        self._settings, self._scaled = settings, scaled

    def ready(self) -> list[int]:
        """Return the process ids of the engines that have announced themselves and live."""
        return self._living(Ready)

    def started(self) -> list[int]:
        """Return the process ids of all engines that live."""
        return self._living(Started)

    def _living(self, kind: type[Ready] | type[Started]) -> list[int]:
        events = list(read_events(self._folder / "pool.jsonl"))
        ended = {event.pid for event in events if isinstance(event, ProcessExited)}
        begun = [event for event in events if isinstance(event, kind) and event.role == ROLE]
        return [event.pid for event in begun if event.pid not in ended]

    async def wait_for_none(self) -> None:
        """Wait until no engine lives, for a limited time."""
        deadline = now() + self._scaled.idle_s + ZERO_TIMEOUT_S
        await _until(lambda: not self.started() or now() > deadline)
        # An autoscaler listens to requests once it has observed that there is no worker.
        await asyncio.sleep(LISTENS_S)

    async def disturb(self) -> None:
        """Inject the faults, each when the number of engines that it requires is ready."""
        for num_ready, fault in self._scaled.faults:
            await _until(functools.partial(self._has_grown, num_ready))
            kind, _, role = fault.partition(":")
            if kind == "lose":
                await self._lose_queue()
            elif role == ROLE:
                self._hit_engine(kind)
            else:
                # A process that is ready, and not one that starts.
                self._pool.send_signal(kind, role, SIGNALS[kind], 1)
            await asyncio.sleep(PAUSE_S)

    def _has_grown(self, num_ready: int) -> bool:
        return bool(self.started()) and len(self.ready()) >= num_ready

    def _hit_engine(self, kind: str) -> None:
        pid = self.ready()[0]
        self._pool.journal.write(Fault(now(), kind, ROLE, 0, pid))
        _signal(pid, SIGNALS[kind])
        if kind == "stop":
            loop = asyncio.get_running_loop()
            loop.call_later(self._scaled.stop_s, _signal, pid, signal.SIGCONT)

    async def _lose_queue(self) -> None:
        """Delete the consumer of one lane under load, and restore it later.

        By then the other lane has been idle for longer than `idle_s`.
        """
        url, stream = self._pool.brokers.url, subjects.STAGES_STREAM
        consumer = subjects.stage_consumer(ROLE, MODEL, LOST_LANE)
        filter_ = subjects.stage_filter(ROLE, MODEL, LOST_LANE)
        nc = await nats.connect(url)
        bus = await Bus.connect(url, "chaos-queue")
        self._pool.journal.write(Fault(now(), "lose", "queue", 0, 0))
        await nc.jetstream().delete_consumer(stream, consumer)
        try:
            await _until(lambda: self._has_ended(OTHER_LANE))
            await asyncio.sleep(3 * self._scaled.idle_s)
        finally:
            await bus.queues.create(stream, consumer, filter_, self._settings.ack_wait_s)
            await bus.close()
            await nc.close()

    def _has_ended(self, lane: str) -> bool:
        """Return whether clients have seen the ends of all requests of a lane."""
        events = read_events(self._folder / "clients.jsonl")
        ended = {e.id for e in events if isinstance(e, RecordReceived) and is_final(e.record)}
        planned = make_requests(self._settings)
        return {entry.id for entry in planned if entry.request.lane == lane} <= ended


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - it reads what other processes write.
        await asyncio.sleep(WATCH_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
