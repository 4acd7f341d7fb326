"""Limits on the tokens of tenants: each admission reserves some, and looks at earlier requests."""

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
# Each tenant has so many open requests at most; older ones keep their reservations.
MAX_OPEN = 10_000
# What these requests have written before is not known: they keep their reservation.
_PARTLY_DONE = ("cancelled", "deadline_exceeded")


MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """Tokens that a tenant may still use, which grow evenly up to those of a minute."""

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
    """Buckets of the tenants that have a limit.

    How many tokens a request will use is not known before it ends. So it reserves the most that it
    may write, and the reservation is corrected once its use is known, prompt included. A tenant's
    bucket may thereby go below zero; no request of the tenant is admitted until time has filled it
    again.
    """

    def __init__(self, per_minute: Mapping[str, int]) -> None:
        self.per_minute = per_minute
        self._buckets: dict[str, _Bucket] = {}

    def reserve(self, tenant: str, num_tokens: int, now_s: float) -> float:
        """Reserve tokens, if any are left, and return 0; otherwise return the seconds until then.

        The last request that is admitted may reserve more than are left, so that none is too large
        for its limit.
        """
        bucket = self._bucket(tenant, now_s)
        if bucket.level <= 0:
            # At least one whole token is left then.
            return (1 - bucket.level) * MINUTE_S / bucket.per_minute
        bucket.add(-num_tokens)
        return 0.0

    def correct(self, tenant: str, num_reserved: int, num_used: int, now_s: float) -> None:
        """Replace a reservation by what the request has used."""
        self._bucket(tenant, now_s).add(num_reserved - num_used)

    def _bucket(self, tenant: str, now_s: float) -> _Bucket:
        per_minute = self.per_minute[tenant]
        bucket = self._buckets.setdefault(tenant, _Bucket(per_minute, per_minute, now_s))
        bucket.fill(now_s)
        return bucket


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """An admitted request whose use of tokens is not known yet."""

    request_id: str
    num_reserved: int


class TokenLimits:
    """The limits of one coordinator, which counts the requests that it has admitted itself."""

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
        """Look at the oldest open requests, and correct reservations of those that have ended."""
        waiting = self._open[tenant]
        looked_at = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        lasts = await asyncio.gather(*(self._last(one.request_id) for one in looked_at))
        for one, last in zip(looked_at, lasts, strict=True):
            if last is None or not is_final(last):
                waiting.append(one)
            elif (num_used := _num_used(last)) is not None:
                self._rates.correct(tenant, one.num_reserved, num_used, time.monotonic())

    async def _last(self, request_id: str) -> LogRecord | None:
        try:
            return await last_record(self._bus, request_id)
        except Unavailable:
            return None


def _num_used(end: LogRecord) -> int | None:
    """Return the tokens of a request that has ended with this record; None if they are unknown."""
    if isinstance(end, Finish):
        return end.usage.prompt_tokens + end.usage.completion_tokens
    if isinstance(end, Failure) and end.error.code in _PARTLY_DONE:
        return None
    return 0
