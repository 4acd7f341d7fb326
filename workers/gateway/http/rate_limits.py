"""How much one key may ask for: requests a minute, and requests at one time. Pure.

Each gateway counts for itself: with two of them a key may have twice as much.
"""

from collections.abc import Callable

from shared.config import ApiKey
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import RateLimited

# Of a client that must wait for another of its requests to end.
BUSY_S = 1.0


class _KeyUsage:
    """A bucket that fills evenly, and what is in flight."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self._key = key
        self._tokens = float(key.max_requests_per_minute or 0)
        self._filled_s = now_s
        self.in_flight = 0

    def enter(self, now_s: float) -> None:
        limit = self._key.max_concurrent
        if limit is not None and self.in_flight >= limit:
            raise RateLimited(f"this key may have {limit} requests at one time", BUSY_S)
        self._take(now_s)
        self.in_flight += 1

    def _take(self, now_s: float) -> None:
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
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` tells monotonic seconds."""
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
        usage.enter(now_s)

    def release(self, caller: Caller) -> None:
        if caller.key is not None:
            self._key_usage[caller.key.sha256].in_flight -= 1
