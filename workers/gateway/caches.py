"""Caches of data from workers and the broker: heartbeats, bytes of tokens, use of the store."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Generic, TypeVar

from shared import client
from shared.bus.bus import Bus
from shared.bus.metering import LogUse, StreamMeter
from shared.errors import Unavailable
from shared.helpers.lru import ByteLRU
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat, StartReport
from shared.protocol.renderer_rpc import DetokenizeRequest
from workers.gateway.core.assembler import TokenBytes

Report = TypeVar("Report", Heartbeat, StartReport)

READ_TIMEOUT_S = 2.0
FRESH_S = 0.5
SIZE_FRESH_S = 1.0
USE_FRESH_S = 1.0
FIRST_MEASURE_S = 1.0
EXACT_FRESH_S = 5.0
MAX_TENANTS = 10_000


class ReportsCache(Generic[Report]):
    """Latest reports of all workers, cached so that frequent probes do not query the broker."""

    def __init__(self, read: Callable[[], Awaitable[list[Report]]]) -> None:
        self._query: Callable[[], Awaitable[list[Report]]] = read
        self._reports: list[Report] = []
        self._read_s = float("-inf")

    async def read(self) -> list[Report]:
        """Raises Unavailable or TimeoutError."""
        if time.monotonic() - self._read_s > FRESH_S:
            async with asyncio.timeout(READ_TIMEOUT_S):
                self._reports = await self._query()
            self._read_s = time.monotonic()
        return self._reports


class SizeCache:
    """Size of a stream in bytes, read at most once in `SIZE_FRESH_S`."""

    def __init__(self, bus: Bus, stream: str) -> None:
        self._bus = bus
        self._stream = stream
        self._num_bytes = 0
        self._read_s = float("-inf")

    async def read(self) -> int:
        """Raises Unavailable."""
        if time.monotonic() - self._read_s > SIZE_FRESH_S:
            self._num_bytes = await self._bus.figures.num_bytes(self._stream)
            self._read_s = time.monotonic()
        return self._num_bytes


class StoreUseCache:
    """Number and size of the stored responses of each tenant.

    New responses are measured at most once in `USE_FRESH_S`. Responses that have expired, or were
    deleted by another gateway, count until the next exact measurement, which reads all responses of
    the tenant. A request of a tenant that has reached a limit waits for one.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        # Each entry counts as one byte, so that the limit is a number of tenants.
        self._uses = ByteLRU[str, _TenantUse](MAX_TENANTS)

    async def read(self, tenant: str) -> LogUse:
        """Return the measured use and the responses that this gateway has stored since.

        If the first measurement takes long, the result is too small until it ends.
        """
        use = self._uses.get(tenant)
        if use is None:
            use = _TenantUse(self._bus, subjects.steps_of_tenant(tenant))
            self._uses.put(tenant, use, 1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_MEASURE_S):
                    await asyncio.shield(use.measure(exact=True))
        elif time.monotonic() - use.measured_s > USE_FRESH_S:
            use.measure(exact=False)
        return use.total

    async def read_exact(self, tenant: str) -> LogUse:
        """Return the use after an exact measurement, at most `EXACT_FRESH_S` old."""
        use = self._uses.get(tenant)
        if use is None:
            return await self.read(tenant)
        if time.monotonic() - use.measured_exactly_s > EXACT_FRESH_S:
            await asyncio.shield(use.measure(exact=True))
        return use.total

    def note_added(self, tenant: str, num_bytes: int) -> None:
        """Count a response that this gateway has stored after the last measurement."""
        if (use := self._uses.get(tenant)) is not None:
            use.added = _sum(use.added, 1, num_bytes)

    def note_deleted(self, tenant: str, num_bytes: int) -> None:
        if (use := self._uses.get(tenant)) is not None:
            use.measured = _sum(use.measured, -1, -num_bytes)


class _TenantUse:
    """Use of the store by one tenant: the last measurement, and the responses added since."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject
        self.measured = LogUse()
        self.added = LogUse()
        self._measuring: asyncio.Task[None] | None = None
        self.measured_s = self.measured_exactly_s = float("-inf")

    @property
    def total(self) -> LogUse:
        return _sum(self.measured, self.added.num_logs, self.added.num_bytes)

    def measure(self, *, exact: bool) -> "asyncio.Task[None]":
        """Return the task of a measurement, which may have begun before."""
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measure(exact=exact))
        return self._measuring

    async def _measure(self, *, exact: bool) -> None:
        added, now_s = self.added, time.monotonic()
        before = LogUse() if exact else self.measured
        with contextlib.suppress(Unavailable):  # The last measurement holds until the next.
            use = await StreamMeter(self._bus).measure_logs(
                subjects.STEPS_STREAM, self._subject, before
            )
            self.measured, self.measured_s = use, now_s
            self.measured_exactly_s = now_s if exact else self.measured_exactly_s
            # Responses added meanwhile may be counted twice until the next measurement.
            self.added = _sum(self.added, -added.num_logs, -added.num_bytes)


def _sum(use: LogUse, num_logs: int, num_bytes: int) -> LogUse:
    return replace(use, num_logs=use.num_logs + num_logs, num_bytes=use.num_bytes + num_bytes)


class TokenBytesCache:
    """Bytes of tokens by token id, filled by asking renderers.

    It needs no limit, because the vocabularies of the models limit its size.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._by_model: dict[str, dict[int, bytes]] = {}

    def of(self, model: str) -> TokenBytes:
        """Return the bytes of a model's tokens. `load` adds tokens to the same mapping."""
        return self._by_model.setdefault(model, {})

    async def load(self, model: str, token_ids: Collection[int], tenant: str) -> None:
        """Make sure that the cache has the bytes of these tokens.

        Missing tokens are requested from a renderer, for `tenant`. Raises Unavailable.
        """
        cached = self._by_model.setdefault(model, {})
        missing = [token_id for token_id in token_ids if token_id not in cached]
        if not missing:
            return
        request = DetokenizeRequest(missing)
        reply = await client.detokenize(self._bus, model, request, tenant=tenant)
        cached.update(zip(missing, reply.token_bytes, strict=True))
