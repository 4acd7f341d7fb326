"""Workers that start while a cluster has no leader."""

import asyncio
import contextlib
from pathlib import Path

from nats.js.errors import APIError

from ops.chaos.processes.cluster import Cluster
from shared.bus.bus import Bus
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from tests.support.waiting import until

ELECTED_S = 60.0


async def reports_no_leader(bus: Bus) -> bool:
    """Whether the cluster answers that it has no leader, not only that a server does not answer."""
    with contextlib.suppress(TimeoutError):
        try:
            await bus.connection.js.account_info()
        except APIError as error:
            return error.err_code is not None
    return False


async def test_a_worker_that_starts_during_an_election_waits_for_its_end(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        await cluster.restart(0)
        bus = await Bus.connect(cluster.members[0].url, "test")
        await until(lambda: reports_no_leader(bus), ELECTED_S)
        preparing = asyncio.create_task(
            bus.streams.prepare(NatsConfig(replicas=3), DeliveryConfig())
        )
        # One of three servers can neither elect a leader nor store anything three times.
        await until(lambda: reports_no_leader(bus), ELECTED_S)
        assert not preparing.done()
        for number in (1, 2):
            await cluster.restart(number)
        await asyncio.wait_for(preparing, ELECTED_S)
        info = await bus.connection.js.stream_info(subjects.REQUESTS_STREAM)
        assert info.config.num_replicas == 3
        await bus.close()
    finally:
        await cluster.stop()
