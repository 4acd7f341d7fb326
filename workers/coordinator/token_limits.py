"""Limits on the tokens of tenants: each admission reserves tokens, and settles earlier requests."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from shared.bus.bus import Bus
from shared.errors import TokenRateExceeded, Unavailable
from shared.protocol.records import Failure, Finish, LogRecord
from shared.state.log_records import is_final
from shared.state.token_log import last_record

# Each admission adds one request, so two are enough to keep up with those that have ended.
LOOKED_AT, LOOKED_AT_BEFORE_REFUSAL = 2, 64
# Maximum number of open requests of a tenant. Older ones keep their reservations.
MAX_OPEN = 10_000
# It is unknown how many tokens these requests have written, so they keep their reservation.
_PARTLY_DONE = ("cancelled", "deadline_exceeded")
MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """Token bucket of a tenant, which refills evenly up to the tokens of one minute."""

    per_minute: int
    level: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        earned = max(0.0, now_s - self.filled_s) * self.per_minute / MINUTE_S
        self.add(earned)
        self.filled_s = max(now_s, self.filled_s)

    def add(self, num_tokens: float) -> None:
        self.level = min(float(self.per_minute), self.level + num_tokens)


class TokenRates:
    """Token buckets of the tenants that have a limit.

    The number of tokens of a request is unknown until it ends. So each request reserves the maximum
    that it may write, and its actual use, prompt included, replaces the reservation later. The
    level of a bucket may become negative; then the tenant's requests are refused until it has
    refilled.
    """

    def __init__(self, per_minute: Mapping[str, int]) -> None:
        self.per_minute = per_minute
        self._buckets: dict[str, _Bucket] = {}

    def reserve(self, tenant: str, num_tokens: int, now_s: float) -> float:
        """Reserve tokens and return 0, or return the seconds until a token is available.

        A request may reserve more tokens than the bucket has, as long as it has one. So no request
        is too large for its limit.
        """
        bucket = self._bucket(tenant, now_s)
        if bucket.level <= 0:
            # At least one whole token is left then.
            return (1 - bucket.level) * MINUTE_S / bucket.per_minute
        bucket.add(-num_tokens)
        return 0.0

    def correct(self, tenant: str, num_reserved: int, num_used: int, now_s: float) -> None:
        """Replace a reservation by the number of tokens that the request has used."""
        self._bucket(tenant, now_s).add(num_reserved - num_used)

    def _bucket(self, tenant: str, now_s: float) -> _Bucket:
        per_minute = self.per_minute[tenant]
        bucket = self._buckets.setdefault(tenant, _Bucket(per_minute, per_minute, now_s))
        bucket.fill(now_s)
        return bucket


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """Admitted request that has not ended, as far as this coordinator knows."""

    request_id: str
    num_reserved: int


class TokenLimits:
    """Limits enforced by one coordinator, for the requests that it has admitted itself."""

    def __init__(self, bus: Bus, per_minute: Mapping[str, int]) -> None:
        self._bus = bus
        self._rates = TokenRates(per_minute)
        self._open = {tenant: deque[_OpenRequest](maxlen=MAX_OPEN) for tenant in per_minute}

    async def check(self, tenant: str, request_id: str, num_tokens: int) -> None:
        """Reserve the tokens that a request may write. Raises TokenRateExceeded."""
        if tenant not in self._open:
            return
        await self._correct(tenant, LOOKED_AT)
        wait_s = self._rates.reserve(tenant, num_tokens, time.monotonic())
        if wait_s:
            await self._correct(tenant, LOOKED_AT_BEFORE_REFUSAL)
            wait_s = self._rates.reserve(tenant, num_tokens, time.monotonic())
        if wait_s:
            limit = self._rates.per_minute[tenant]
            raise TokenRateExceeded(
                f"tenant {tenant} has used its {limit} tokens a minute"
                f" (delivery.tokens_per_minute); try again in {wait_s:.0f} s",
                wait_s,
            )
        self._open[tenant].append(_OpenRequest(request_id, num_tokens))

    async def _correct(self, tenant: str, count: int) -> None:
        """Read the logs of the oldest open requests, and settle the requests that have ended."""
        waiting = self._open[tenant]
        oldest = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        lasts = await asyncio.gather(*(self._last(request.request_id) for request in oldest))
        for request, last in zip(oldest, lasts, strict=True):
            if last is None or not is_final(last):
                waiting.append(request)
            elif (num_used := _num_used(last)) is not None:
                self._rates.correct(tenant, request.num_reserved, num_used, time.monotonic())

    async def _last(self, request_id: str) -> LogRecord | None:
        try:
            return await last_record(self._bus, request_id)
        except Unavailable:
            return None


def _num_used(end: LogRecord) -> int | None:
    """Return the number of tokens of a request with this final record; None if it is unknown."""
    if isinstance(end, Finish):
        return end.usage.prompt_tokens + end.usage.completion_tokens
    if isinstance(end, Failure) and end.error.code in _PARTLY_DONE:
        return None
    return 0
