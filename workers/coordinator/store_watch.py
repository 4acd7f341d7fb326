"""Watch on the broker's storage: a broker that answers may still refuse to store messages."""

import asyncio
import time
from collections.abc import Mapping

import structlog

from shared.bus.bus import Bus
from shared.bus.store_probes import PROBE_S, Refusal

# Longer than an election of a replicated stream, which takes 4 to 7 seconds.
PATIENCE_S = 10.0

_log = structlog.get_logger()


class StoreWatch:
    """Probes the streams on disk, and records since when the probes of a stream have failed."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._since_s: dict[str, float] = {}
        self._refusing: set[str] = set()

    @property
    def num_refusing(self) -> float:
        """Number of streams that have failed their probes for PATIENCE_S."""
        return float(len(self._refusing))

    async def run(self) -> None:
        """Probe every PROBE_S, except while there is no broker."""
        while True:
            if self._bus.is_connected:
                self._update(await self._bus.streams.probe(), time.monotonic())
            await asyncio.sleep(PROBE_S)

    def _update(self, refusals: Mapping[str, Refusal], now_s: float) -> None:
        self._since_s = {stream: self._since_s.get(stream, now_s) for stream in refusals}
        before = self._refusing
        self._refusing = {s for s, since_s in self._since_s.items() if now_s - since_s > PATIENCE_S}
        if self._refusing - before:
            _log.error(
                "broker_refuses_to_store",
                reasons={stream: refusals[stream].reason for stream in sorted(self._refusing)},
            )
        elif before and not self._refusing:
            _log.info("broker_stores_again", streams=sorted(before))
