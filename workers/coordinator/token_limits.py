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
from workers.coordinator.token_rates import TokenRates

# Each admission adds one request, so two are enough to keep up with those that have ended.
LOOKED_AT, LOOKED_AT_BEFORE_REFUSAL = 2, 64
# Maximum number of open requests of a tenant. Older ones keep their reservations.
MAX_OPEN = 10_000
# It is unknown how many tokens these requests have written, so they keep their reservation.
_PARTLY_DONE = ("cancelled", "deadline_exceeded")


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
