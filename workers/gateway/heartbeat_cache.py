"""Cache of the heartbeats of all workers, so that frequent probes do not each ask the broker."""

import asyncio
import time

from shared.bus.bus import Bus
from shared.protocol.messages import Heartbeat

READ_TIMEOUT_S = 2.0
FRESH_S = 0.5


class HeartbeatCache:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._beats: list[Heartbeat] = []
        self._read_s = float("-inf")

    async def read(self) -> list[Heartbeat]:
        """Raises Unavailable or TimeoutError."""
        if time.monotonic() - self._read_s > FRESH_S:
            async with asyncio.timeout(READ_TIMEOUT_S):
                self._beats = await self._bus.read_heartbeats()
            self._read_s = time.monotonic()
        return self._beats
