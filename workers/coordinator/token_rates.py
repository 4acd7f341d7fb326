"""Rates of tokens by tenant: whether a request may be admitted, and what it has used. Pure.

How many tokens a request will use is not known before it ends. So it reserves the most that it may
write, and the reservation is corrected once its use is known, prompt included. A tenant's bucket
may thereby go below zero; no request of the tenant is admitted until time has filled it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """The buckets of tenants that have a limit."""

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
