"""Storage quotas: coordinators measure each tenant's storage, and all workers refuse requests.

Coordinators publish the list of tenants over their share next to the heartbeats, and it expires
like them. Without a coordinator, no request is refused.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Mapping

import structlog

from shared.bus.bus import Bus
from shared.bus.metering import StreamMeter
from shared.errors import QuotaExceeded, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.exceeded_shares import ExceededShare, ExceededShares, decode_exceeded_shares
from shared.protocol.requests import GenerateRequest, count_media
from shared.tenants.storage_shares import NEWCOMER, StreamUse, exceeded_shares, may_be_exceeded

# Streams that tenants fill: a description of their messages, and the setting of the limit.
LIMITS = {
    subjects.TOKENS_STREAM: ("token logs", "delivery.max_token_log_mib"),
    subjects.MEDIA_STREAM: ("media", "delivery.max_media_mib"),
    subjects.JOBS_STREAM: ("request records", "delivery.max_job_mib"),
    subjects.DEAD_STREAM: ("dead letters", "delivery.max_dead_mib"),
    subjects.BATCHES_STREAM: ("batches", "batch.store_mib"),
}
MEDIA_STREAMS = (subjects.MEDIA_STREAM,)
LOG_STREAMS = (subjects.TOKENS_STREAM, subjects.JOBS_STREAM)
"""Streams that requests of all kinds fill."""
READ_S = 1.0
PAUSE_S = 1.0
# At most a fifth of the time is spent on measuring.
PAUSE_FACTOR = 4.0
# A gateway stores at most 1/64 of the stream of media between two measurements.
UNMEASURED_PARTS = 64
# Maximum number of published tenants. The largest ones are published.
MAX_PUBLISHED = 1000

_log = structlog.get_logger()


def streams_filled_by(request: GenerateRequest) -> tuple[str, ...]:
    """Return the streams that a request fills."""
    return (*LOG_STREAMS, *MEDIA_STREAMS) if count_media(request) else LOG_STREAMS


class StorageQuotas:
    """The tenants that one worker refuses, from the list that coordinators published last."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._exceeded: list[ExceededShare] = []
        self._read_s = float("-inf")

    async def check(self, tenant: str, streams: Collection[str]) -> None:
        """Raise QuotaExceeded for a tenant over its share of one of the streams.

        Callers without a tenant are never refused.
        """
        if not tenant:
            return
        if time.monotonic() - self._read_s > READ_S:
            # Set before the read, so that other callers do not wait for it.
            self._read_s = time.monotonic()
            with contextlib.suppress(Unavailable):
                self._exceeded = await read_exceeded(self._bus)
        _raise_if_exceeded(self._exceeded, tenant, streams)


class MediaQuotas:
    """The tenants whose media one gateway refuses.

    Uploads are as fast as the broker's disk, and could fill the stream between two measurements by
    coordinators. So a gateway measures again each time that it has stored a small part of the
    stream.
    """

    def __init__(self, bus: Bus, weights: Mapping[str, float]) -> None:
        self._bus = bus
        self._weights = weights
        self._exceeded: list[ExceededShare] = []
        self._unmeasured_bytes = 0
        self._max_unmeasured = 0
        self._measure_again_s = float("-inf")
        self._measuring = asyncio.Lock()

    async def check(self, tenant: str, num_bytes: int) -> None:
        """Raise QuotaExceeded if a tenant may not store `num_bytes` more."""
        if not tenant:
            return
        self._unmeasured_bytes += num_bytes
        async with self._measuring:
            if (
                self._unmeasured_bytes > self._max_unmeasured
                or time.monotonic() > self._measure_again_s
            ):
                await self._measure()
        _raise_if_exceeded(self._exceeded, tenant, MEDIA_STREAMS)

    async def _measure(self) -> None:
        began_s, counted = time.monotonic(), self._unmeasured_bytes
        try:
            max_bytes, _ = await self._bus.figures.fill(subjects.MEDIA_STREAM)
            self._max_unmeasured = max_bytes // UNMEASURED_PARTS
            self._exceeded = await measure_exceeded(self._bus, self._weights, MEDIA_STREAMS)
        except Unavailable as error:
            _log.warning("storage_not_measured", reason=error.message)
        self._unmeasured_bytes -= counted
        self._measure_again_s = next_measurement_s(began_s)


def next_measurement_s(began_s: float) -> float:
    """Return the monotonic time of the next measurement, after one that ends now."""
    now_s = time.monotonic()
    return now_s + max(PAUSE_S, PAUSE_FACTOR * (now_s - began_s))


async def has_exceeded(bus: Bus, tenant: str, stream: str) -> bool:
    """Return whether the list that coordinators published last has a tenant for this stream.

    Raises Unavailable.
    """
    exceeded = await read_exceeded(bus) if tenant else []
    return any(share.stream == stream and share.tenant in (tenant, NEWCOMER) for share in exceeded)


def _raise_if_exceeded(
    exceeded: Iterable[ExceededShare], tenant: str, streams: Collection[str]
) -> None:
    for share in exceeded:
        if share.stream in streams and share.tenant in (tenant, NEWCOMER):
            raise _refusal(share)


def _refusal(share: ExceededShare) -> QuotaExceeded:
    name, setting = LIMITS.get(share.stream, (share.stream, share.stream))
    if share.tenant == NEWCOMER:
        whose = f"the {name} of all tenants together leave no room"
    else:
        whose = f"this tenant has {share.num_bytes} bytes of {name}, and its share is now"
        whose = f"{whose} {share.max_bytes} bytes"
    return QuotaExceeded(
        f"{whose} ({setting}); try again in {QuotaExceeded.retry_after_s:g} s, when older ones may"
        " have expired"
    )


async def read_exceeded(bus: Bus) -> list[ExceededShare]:
    """Return the list that coordinators published last. Raises Unavailable."""
    stored = await bus.read_last(subjects.WORKERS_STREAM, subjects.EXCEEDED_SHARES)
    message = None if stored is None else decode_exceeded_shares(stored.data)
    return [] if message is None else message.exceeded


async def publish_exceeded(bus: Bus, exceeded: list[ExceededShare]) -> None:
    """Publish the tenants to refuse, for all workers. Raises Unavailable."""
    shares = sorted(exceeded, key=lambda share: (share.tenant != NEWCOMER, -share.num_bytes))
    data = to_json(ExceededShares(shares[:MAX_PUBLISHED]))
    await bus.publish_without_id(subjects.EXCEEDED_SHARES, data)


async def measure_exceeded(
    bus: Bus, weights: Mapping[str, float], streams: Iterable[str] = LIMITS
) -> list[ExceededShare]:
    """Return the tenants over their share of these streams. Raises Unavailable.

    The use of each tenant is measured only for a stream that is full enough for one to be over it.
    """
    exceeded: list[ExceededShare] = []
    for stream in streams:
        max_bytes, num_bytes = await bus.figures.fill(stream)
        if may_be_exceeded(max_bytes, num_bytes, weights):
            by_tenant = await StreamMeter(bus).measure_tenants(stream)
            use = StreamUse(stream, max_bytes, num_bytes, by_tenant)
            exceeded += exceeded_shares(use, weights)
    return exceeded
