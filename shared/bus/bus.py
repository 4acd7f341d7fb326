"""Connection to the broker: publishing, reading, live messages, consumers and heartbeats.

This package handles delivery. It does not know the content of messages or the logic of stages.
"""

import asyncio
import contextlib
import math

import structlog
from nats.aio.client import Client as NatsClient
from nats.errors import Error as NatsError

from shared.bus.connection import MAX_RETRY_S, connect, local_address
from shared.bus.login import Login
from shared.bus.messaging import Messenger
from shared.bus.metering import StreamMeter
from shared.bus.publishing import Publisher
from shared.bus.queues import Queues
from shared.bus.reading import StreamReader
from shared.bus.snapshots import StreamSnapshots
from shared.bus.store_probes import StoreProbes
from shared.errors import PagemillError, Unavailable
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat, StartReport, decode_heartbeat, decode_start_report

WILDCARDS = ("", "0.0.0.0", "::")

# Heartbeats are published every second. A worker without one for this time counts as dead.
# A replica that serves reads may lag for a moment.
STALE_READ_S = 0.02
DEAD_AFTER_S = 3.0

_log = structlog.get_logger()


class Bus(Publisher, StreamReader, StreamMeter, Queues, StoreProbes, StreamSnapshots, Messenger):
    """Connection to the broker, which reconnects without a limit on attempts."""

    def __init__(self, nc: NatsClient) -> None:
        super().__init__(nc)
        self._restoring: asyncio.Task[None] | None = None
        self._is_stale = False
        """Whether streams or consumers may be missing."""
        self._restore_again_s = 0.0
        """Loop time of the next attempt to restore them."""
        self._closing = False

    @classmethod
    async def connect(cls, server: Login | str, name: str, timeout_s: float = 10.0) -> "Bus":
        """Connect to a server; a URL alone stands for `Login.of_operator`.

        Raises Unavailable when no server answers within `timeout_s`, or it refuses the login.
        """
        bus: Bus | None = None
        login = server if isinstance(server, Login) else Login.of_operator(server)
        url = str(login)

        async def on_disconnect() -> None:
            if bus is not None and not bus._closing:
                _log.warning("broker_disconnected", url=url)

        async def on_reconnect() -> None:
            if bus is not None:
                _log.info("broker_reconnected", url=url)
                bus._restore()

        bus = cls(await connect(login, name, timeout_s, on_disconnect, on_reconnect))
        bus.creates_streams = login.creates_streams
        try:
            await bus.sync_clock()
        except Unavailable:
            await bus.close()
            raise
        return bus

    def _restore(self) -> None:
        """Restore pulls, streams and consumers, and wake readers, after a reconnect."""
        for consumer in self._consumers:
            consumer.on_reconnect()
        for live in self._live:
            live.wake()
        # The tasks may be lost. Until this is known, every request counts as older than the stream.
        self.tasks = self.tasks._replace(since_ms=math.inf)
        self.check_streams()

    def check_streams(self) -> None:
        self._is_stale = True
        if self.is_prepared and (self._restoring is None or self._restoring.done()):
            self._restoring = asyncio.create_task(self._restore_streams())

    async def _restore_streams(self) -> None:
        # A single broker restarts without its in-memory streams and their consumers.
        logged, loop = "", asyncio.get_running_loop()
        while self._is_stale and not self._closing:
            await asyncio.sleep(self._restore_again_s - loop.time())
            self._restore_again_s = loop.time() + MAX_RETRY_S
            self._is_stale = False
            try:
                await self.restore_streams()
                if self._is_stale:
                    self.tasks = self.tasks._replace(since_ms=math.inf)
            except (NatsError, PagemillError) as error:
                self._is_stale = True
                if (reason := str(error) or type(error).__name__) != logged:
                    _log.warning("streams_not_restored", error=reason)
                    logged = reason

    async def close(self) -> None:
        """Stop the consumers and close the connection."""
        self._closing = True
        if self._restoring is not None:
            self._restoring.cancel()
        for consumer in self._consumers:
            await consumer.stop()
        # Without a server, nats-py's close fails.
        with contextlib.suppress(NatsError, OSError, RuntimeError):
            await self._nc.flush(timeout=2)
        with contextlib.suppress(NatsError, OSError, RuntimeError):
            await self._nc.close()

    @property
    def is_connected(self) -> bool:
        return self._nc.is_connected

    def address_of(self, listen: str) -> str:
        """Return the address at which other machines reach a listener on `listen`.

        For a wildcard, it is the local address of this connection, which other workers can reach.
        """
        return local_address(self._nc) if listen in WILDCARDS else listen

    # -- heartbeats -----------------------------------------------------------------------------

    async def publish_heartbeat(self, worker: str, data: bytes) -> None:
        await self.publish_without_id(subjects.heartbeat(worker), data)

    async def read_heartbeats(self) -> list[Heartbeat]:
        """Return the latest heartbeat of every live worker.

        Undecodable messages are skipped, because any client may publish on the bus.
        """
        stored = await self.read(subjects.WORKERS_STREAM, subjects.HEARTBEATS_FILTER)
        newest_ms = max((beat.stored_ms for beat in stored), default=0.0)
        latest = [b.data for b in stored if newest_ms - b.stored_ms <= 1000 * DEAD_AFTER_S]
        return [beat for data in latest if (beat := decode_heartbeat(data)) is not None]

    async def publish_start_report(self, worker: str, data: bytes) -> None:
        await self.publish_without_id(subjects.start_report(worker), data)

    async def read_start_reports(self) -> list[StartReport]:
        """Return the latest report of every live worker without a heartbeat."""
        stored = await self.read(subjects.WORKERS_STREAM, subjects.WORKERS_FILTER)
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

    async def heartbeat_lag_s(self, worker: str, observer: str) -> float:
        """Return the time from the latest heartbeat of `worker` to the latest one of `observer`.

        Infinite for a worker without a stored heartbeat. During an outage of the broker no
        heartbeat is stored, so only a comparison with a live worker shows that a worker is dead.
        """
        last = await self.read_last(subjects.WORKERS_STREAM, subjects.heartbeat(worker))
        own = await self.read_last(subjects.WORKERS_STREAM, subjects.heartbeat(observer))
        if last is None:
            return math.inf
        return 0.0 if own is None else (own.stored_ms - last.stored_ms) / 1000
