"""Watch on the replicas of streams: a server may store nothing while the others do."""

import asyncio
import time

import structlog

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.telemetry.metrics import Metrics, ReadValue

# Interval between looks at all streams.
LOOK_S = 5.0
# A server that was restarted follows its leaders again within seconds.
PATIENCE_S = 60.0

_log = structlog.get_logger()


class ReplicaWatch:
    """Counts, for each server of a cluster, the replicas that do not follow their leaders.

    Most servers of a cluster are enough to store a message. So neither publishes nor probes show
    a server that has not stored anything since its disk was full.
    """

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._num_lagging: dict[str, int] = {}
        """Replicas that lag, by server. A server stays in it with 0."""
        self._since_s: dict[str, float] = {}
        """Time since when a server has had such replicas."""
        self._logged: set[str] = set()

    async def run(self) -> None:
        """Look every LOOK_S, if the streams have replicas."""
        streams = [c.name or "" for c in self._bus.streams.configs if (c.num_replicas or 1) > 1]
        while streams:
            try:
                lagging = [await self._bus.figures.lagging_replicas(name) for name in streams]
            except Unavailable:
                pass  # The probes of the streams report it.
            else:
                self._update([server for servers in lagging for server in servers])
            await asyncio.sleep(LOOK_S)

    def _update(self, servers: list[str]) -> None:
        now_s = time.monotonic()
        for server in servers:
            if server not in self._num_lagging:
                self._metrics.set_function("replicas_lagging", self._reader(server), server=server)
        all_servers = self._num_lagging.keys() | set(servers)
        self._num_lagging = {server: servers.count(server) for server in all_servers}
        self._since_s = {server: self._since_s.get(server, now_s) for server in set(servers)}
        self._log_changes(now_s)

    def _reader(self, server: str) -> ReadValue:
        return lambda: float(self._num_lagging[server])

    def _log_changes(self, now_s: float) -> None:
        since_s = self._since_s
        late = {server for server, began_s in since_s.items() if now_s - began_s > PATIENCE_S}
        for server in late - self._logged:
            _log.error("replicas_lag", server=server, streams=self._num_lagging[server])
        for server in self._logged - since_s.keys():
            _log.info("replicas_follow_again", server=server)
        self._logged = late | (self._logged & since_s.keys())
