"""Turns of tenants: heavy users of a busy model are served after the other tenants."""

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
"""Requests within this time share one reading of the queues."""
RETRY_S = 30.0
"""Pause after a failed reading, for example when the keys of the coordinator do not permit it."""
MANY_CLAIMED = 4
"""Number of claimed tasks that makes a model busy: further tasks share the workers' time. Requests
of the interactive lane that were admitted within `READ_S` count as well, because the first reading
in a burst of requests is too early to find their tasks."""
BUSY_S = 2.0
"""Time for which a model counts as busy. A flood of short requests has few claimed tasks at most
moments."""
BYTES, TOKENS, MEDIA = 2**16, 64, 8
"""Weights of a request's cost: it is 1, plus 1 for each `BYTES` bytes and each `TOKENS` tokens that
it may write, plus `MEDIA` for each medium."""
HALF_LIFE_S = 5.0
"""Time after which a use counts half."""
FACTOR = 1.25
"""Multiple of its share that a tenant may use, because use is never exactly even."""
FORGOTTEN = 0.01
"""Use below which a tenant no longer counts as active."""

_log = structlog.get_logger()


class TenantUse:
    """Recent use of one model by each tenant, with its decay.

    A tenant's share is the mean use of all recently active tenants, times its weight. So a single
    tenant never exceeds its share, and neither do tenants with equal use.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._used: dict[str, float] = {}
        self._faded_s = 0.0

    def add(self, tenant: str, cost: float, now_s: float) -> None:
        """Add the cost of a request, a positive number."""
        left = 0.5 ** (max(0.0, now_s - self._faded_s) / HALF_LIFE_S)
        self._faded_s = max(now_s, self._faded_s)
        self._used = {t: u * left for t, u in self._used.items() if u * left > FORGOTTEN}
        self._used[tenant] = self._used.get(tenant, 0.0) + cost

    def exceeds_share(self, tenant: str) -> bool:
        """Return whether the tenant uses more than its share of the total."""
        weights = sum(map(self._weight, self._used))
        share = sum(self._used.values()) * self._weight(tenant) / weights if weights else 0.0
        return self._used.get(tenant, 0.0) > FACTOR * share

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class Turns:
    """Chooses the lanes of requests, from the requests that this coordinator has admitted."""

    def __init__(self, bus: Bus, weights: Mapping[str, float]) -> None:
        self._bus = bus
        self._use: defaultdict[str, TenantUse] = defaultdict(lambda: TenantUse(weights))
        self._busy_s: dict[str, float] = {}
        """Time when each model last had waiting tasks, or at least `MANY_CLAIMED` claimed ones."""
        self._read_s = float("-inf")
        self._admitted: Counter[str] = Counter()
        """Requests of the interactive lane that were admitted since `_counted_s`, by model."""
        self._counted_s = float("-inf")

    async def lane_of(self, admitted: Admitted, tenant: str, num_bytes: int) -> str:
        """Return the lane for the tasks of a request.

        It is the lane of the request, or the slowest lane if the model is busy and the tenant uses
        more than its share of it.
        """
        request = admitted.request
        use = self._use[request.model]
        use.add(tenant, _cost(admitted, num_bytes), time.monotonic())
        if use.exceeds_share(tenant) and await self._is_busy(request.model):
            return subjects.LANES[-1]
        if request.lane == subjects.LANES[0]:
            self._admitted[request.model] += 1
        return request.lane

    async def _is_busy(self, model: str) -> bool:
        if time.monotonic() - self._counted_s >= READ_S:
            self._counted_s = time.monotonic()
            self._admitted.clear()
        if self._admitted[model] >= MANY_CLAIMED:
            return True
        if time.monotonic() - self._read_s >= READ_S:
            self._read_s = time.monotonic()
            try:
                depths = await self._bus.figures.depths(subjects.STAGES_STREAM)
            except Unavailable as error:
                self._read_s += RETRY_S
                _log.warning("queues_not_read", reason=error.message)
                depths = []
            claimed: Counter[str] = Counter()
            for depth in depths:
                many = MANY_CLAIMED if depth.num_pending else depth.num_in_flight
                claimed[subjects.model_of_stage(depth.subject)] += many
            for name, number in claimed.items():
                if number >= MANY_CLAIMED:
                    self._busy_s[name] = time.monotonic()
        return time.monotonic() - self._busy_s.get(model, float("-inf")) < BUSY_S


def _cost(admitted: Admitted, num_bytes: int) -> float:
    tokens = most_tokens(admitted)
    num_media = count_media(admitted.request)
    return 1 + num_bytes / BYTES + tokens / TOKENS + MEDIA * num_media
