"""Measures the storage of tenants, and publishes which tenants are over their share."""

import asyncio
import time
from collections.abc import Mapping

import structlog

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.tenants.storage_quotas import measure_exceeded, next_measurement_s, tell_exceeded

_log = structlog.get_logger()


class StorageMeter:
    def __init__(self, bus: Bus, weights: Mapping[str, float]) -> None:
        self._bus = bus
        self._weights = weights
        self._told: set[tuple[str, str]] = set()
        """Streams and tenants that were told last."""

    async def run(self) -> None:
        """Measure periodically. An outage is logged once."""
        reason = ""
        while True:
            began_s = time.monotonic()
            try:
                await self.measure()
                reason = ""
            except Unavailable as error:
                if error.message != reason:
                    reason = error.message
                    _log.warning("storage_not_measured", reason=reason)
            await asyncio.sleep(next_measurement_s(began_s) - time.monotonic())

    async def measure(self) -> None:
        """Measure once, and tell what was found, or that there is nothing any more."""
        exceeded = await measure_exceeded(self._bus, self._weights)
        if exceeded or self._told:
            await tell_exceeded(self._bus, exceeded)
        found = {(share.stream, share.tenant) for share in exceeded}
        for share in exceeded:
            if (share.stream, share.tenant) not in self._told:
                _log.warning(
                    "storage_quota_exceeded",
                    stream=share.stream,
                    tenant=share.tenant,
                    num_bytes=share.num_bytes,
                    max_bytes=share.max_bytes,
                )
        self._told = found
