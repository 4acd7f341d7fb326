"""API keys: authentication and rate limits. Pure.

Only SHA-256 digests are stored, and compared in constant time. Each gateway counts only its own
requests, so with two gateways a key may use twice its limit.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shared.config.schema import ApiKey, Right
from workers.gateway.http.errors import InvalidKey, MissingRight, RateLimited

# Retry-After of a client that must wait until another of its requests ends.
BUSY_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    name: str
    tenant: str
    key: ApiKey | None = None

    def check_right(self, right: Right) -> None:
        """Raises MissingRight. Without configured keys, every caller has all rights."""
        if self.key is not None and right not in self.key.rights:
            raise MissingRight(f"this key does not have the right {right!r} (gateway.api_keys)")


def tenant_of_key(key: ApiKey) -> str:
    return key.name if key.tenant is None else key.tenant


def has_several_tenants(keys: Iterable[ApiKey]) -> bool:
    return len({tenant_of_key(key) for key in keys}) > 1


def make_key() -> str:
    return "pm-" + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Keyring:
    """The configured API keys."""

    def __init__(self, keys: Sequence[ApiKey], tenant: str | None = None) -> None:
        """`tenant` is the tenant of all callers if there are no keys; None for no tenant."""
        self._keys = [(key.sha256.encode(), key) for key in keys]
        self._anonymous = Caller("", tenant or "")

    def authenticate(self, authorization: Sequence[str]) -> Caller:
        """Return the caller that the Authorization headers identify. Raises InvalidKey.

        All keys are compared even after a match, so that the response time reveals nothing about
        any of them.
        """
        if not self._keys:
            return self._anonymous
        scheme, _, key_text = authorization[0].partition(" ") if authorization else ("", "", "")
        if len(authorization) != 1 or scheme.lower() != "bearer":
            raise InvalidKey(
                "an API key is required: send `Authorization: Bearer KEY`, or `X-Api-Key: KEY`"
            )
        sha256, match = digest(key_text.strip()).encode(), None
        for configured, key in self._keys:
            if hmac.compare_digest(configured, sha256):
                match = key
        if match is None:
            raise InvalidKey("the API key is not valid")
        return Caller(match.name, tenant_of_key(match), match)


class _KeyUsage:
    """A token bucket that fills evenly, and the number of requests in flight."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self._tokens = float(key.max_requests_per_minute or 0)
        self._filled_s = now_s
        self.in_flight = 0

    def acquire(self, now_s: float) -> None:
        limit = self.key.max_concurrent
        if limit is not None and self.in_flight >= limit:
            raise RateLimited(f"this key may have at most {limit} requests at one time", BUSY_S)
        rate = self.key.max_requests_per_minute
        if rate is not None:
            earned = (now_s - self._filled_s) * rate / 60
            self._tokens, self._filled_s = min(float(rate), self._tokens + earned), now_s
            if self._tokens < 1:
                wait_s = (1 - self._tokens) * 60 / rate
                raise RateLimited(f"this key may send at most {rate} requests a minute", wait_s)
            self._tokens -= 1
        self.in_flight += 1


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
        usage.key = caller.key  # Its limits may have changed.
        usage.acquire(now_s)

    def release(self, caller: Caller) -> None:
        if caller.key is not None:
            self._key_usage[caller.key.sha256].in_flight -= 1
