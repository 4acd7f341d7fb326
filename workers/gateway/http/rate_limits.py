"""Rate limits of API keys: requests per minute, and concurrent requests. Pure.

Each gateway counts by itself, so with two gateways a key may use twice its limit.
"""

from collections.abc import Callable

from shared.config import ApiKey
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import RateLimited

# Retry-After of a client that must wait until another of its requests ends.
BUSY_S = 1.0


class _KeyUsage:
    """A token bucket that fills evenly, and the number of requests in flight."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self._key = key
        self._tokens = float(key.max_requests_per_minute or 0)
        self._filled_s = now_s
        self.in_flight = 0

    def acquire(self, now_s: float) -> None:
        limit = self._key.max_concurrent
        if limit is not None and self.in_flight >= limit:
            raise RateLimited(f"this key may have {limit} requests at one time", BUSY_S)
        self._take_token(now_s)
        self.in_flight += 1

    def _take_token(self, now_s: float) -> None:
        rate = self._key.max_requests_per_minute
        if rate is None:
            return
        earned = (now_s - self._filled_s) * rate / 60
        self._tokens, self._filled_s = min(float(rate), self._tokens + earned), now_s
        if self._tokens < 1:
            raise RateLimited(
                f"this key may send {rate} requests a minute", (1 - self._tokens) * 60 / rate
            )
        self._tokens -= 1


class RateLimiter:
    """Counts the requests of all keys."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._key_usage: dict[str, _KeyUsage] = {}

    def acquire(self, caller: Caller) -> None:
        """Count a request of `caller`, until `release`. Raises RateLimited."""
        if caller.key is None:
            return
        now_s = self._clock()
        usage = self._key_usage.get(caller.key.sha256)
        if usage is None:
            usage = self._key_usage[caller.key.sha256] = _KeyUsage(caller.key, now_s)
        usage.acquire(now_s)

    def release(self, caller: Caller) -> None:
        if caller.key is not None:
            self._key_usage[caller.key.sha256].in_flight -= 1
