"""Turns of tenants: one that uses too much of a busy model is served behind the others."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping

import structlog

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.requests import count_media
from workers.coordinator.admission import Admitted, most_tokens

READ_S = 0.25
"""Requests within this time share what was read of the queues."""
RETRY_S = 30.0
"""Time until the next reading behind one that failed, as with keys that do not permit it."""
MANY_CLAIMED = 4
"""With so many tasks of a model in the workers of its stages, one more has to share their time."""
BYTES, TOKENS, MEDIA = 2**16, 64, 8
"""So many bytes of a request, and tokens that it may write, cost as much as a request by itself; a
medium costs as much as `MEDIA` requests."""

_log = structlog.get_logger()


HALF_LIFE_S = 5.0
"""Time after which half of a use is left."""
FACTOR = 1.25
"""Tenants may use so many times their share, since their use is never exactly even."""
FORGOTTEN = 0.01
"""What is left of a request's use when its tenant no longer counts."""


class TenantUse:
    """Recent use of one model by tenants: which of them uses more than its share.

    Use fades with time. A tenant's share is the mean of the tenants that have used something
    lately, times its weight; so a tenant that is alone never exceeds its share, nor do tenants that
    use alike.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._used: dict[str, float] = {}
        self._faded_s = 0.0

    def add(self, tenant: str, cost: float, now_s: float) -> None:
        """Count the cost of a request, which is positive."""
        left = 0.5 ** (max(0.0, now_s - self._faded_s) / HALF_LIFE_S)
        self._faded_s = max(now_s, self._faded_s)
        self._used = {t: u * left for t, u in self._used.items() if u * left > FORGOTTEN}
        self._used[tenant] = self._used.get(tenant, 0.0) + cost

    def exceeds_share(self, tenant: str) -> bool:
        """Return whether the tenant uses more than its share of what all use."""
        weights = sum(map(self._weight, self._used))
        share = sum(self._used.values()) * self._weight(tenant) / weights if weights else 0.0
        return self._used.get(tenant, 0.0) > FACTOR * share

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class Turns:
    """The lanes of requests, as one coordinator chooses them by the requests that it has seen."""

    def __init__(self, bus: Bus, weights: Mapping[str, float]) -> None:
        self._bus = bus
        self._use: defaultdict[str, TenantUse] = defaultdict(lambda: TenantUse(weights))
        self._busy: set[str] = set()
        """Models with stages whose tasks wait, or are many."""
        self._read_s = float("-inf")

    async def lane_of(self, admitted: Admitted, tenant: str, num_bytes: int) -> str:
        """Return the lane for the tasks of a request of a tenant.

        It is the request's own, but the slower one for a tenant that uses more than its share of
        the model while one of the model's stages is busy.
        """
        request = admitted.request
        use = self._use[request.model]
        use.add(tenant, _cost(admitted, num_bytes), time.monotonic())
        if use.exceeds_share(tenant) and request.model in await self._busy_models():
            return subjects.LANES[-1]
        return request.lane

    async def _busy_models(self) -> set[str]:
        if time.monotonic() - self._read_s >= READ_S:
            self._read_s = time.monotonic()
            try:
                depths = await self._bus.queue_depths(subjects.STAGES_STREAM)
            except Unavailable as error:
                self._read_s += RETRY_S
                _log.warning("queues_not_read", reason=error.message)
                return self._busy
            claimed: Counter[str] = Counter()
            for depth in depths:
                many = MANY_CLAIMED if depth.num_pending else depth.num_in_flight
                claimed[subjects.model_of_stage(depth.subject)] += many
            self._busy = {model for model, number in claimed.items() if number >= MANY_CLAIMED}
        return self._busy


def _cost(admitted: Admitted, num_bytes: int) -> float:
    tokens = most_tokens(admitted)
    num_media = count_media(admitted.request)
    return 1 + num_bytes / BYTES + tokens / TOKENS + MEDIA * num_media
