"""Token buckets of tenants, which limit their tokens per minute. Pure.

The number of tokens of a request is unknown until it ends. So each request reserves the maximum
that it may write, and its actual use, prompt included, replaces the reservation later. The level
of a bucket may become negative; then the tenant's requests are refused until it has refilled.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Buckets of the tenants that have a limit."""

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
