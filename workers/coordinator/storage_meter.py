"""Measures the storage of tenants, and publishes which tenants are over their share."""

import asyncio
import time
from collections.abc import Mapping

import structlog

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.tenants.storage_quotas import measure_exceeded, next_measurement_s, publish_exceeded

_log = structlog.get_logger()


class StorageMeter:
    def __init__(self, bus: Bus, weights: Mapping[str, float]) -> None:
        self._bus = bus
        self._weights = weights
        self._published: set[tuple[str, str]] = set()
        """Streams and tenants of the last message."""

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
        """Measure once, and publish the tenants over their share; once also an empty list."""
        exceeded = await measure_exceeded(self._bus, self._weights)
        if exceeded or self._published:
            await publish_exceeded(self._bus, exceeded)
        for share in exceeded:
            if (share.stream, share.tenant) not in self._published:
                _log.warning(
                    "storage_quota_exceeded",
                    stream=share.stream,
                    tenant=share.tenant,
                    num_bytes=share.num_bytes,
                    max_bytes=share.max_bytes,
                )
        self._published = {(share.stream, share.tenant) for share in exceeded}
