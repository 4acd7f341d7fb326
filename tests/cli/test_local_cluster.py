"""All roles on one machine: how it ends."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from shared.bus.bus import Bus
from shared.config import Config, NatsConfig
from workers.cli.local_cluster import LocalCluster
from workers.roles import WorkerSpec


async def test_nobody_misses_the_broker_when_the_start_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the workers takes leave of it before it is stopped."""
    config = Config({}, nats=NatsConfig(port=0, store_dir=str(tmp_path)))
    log_file = tmp_path / "workers.log"
    cluster = LocalCluster(config, None, [WorkerSpec("coordinator")], log_file=log_file)
    connected: asyncio.Future[Bus] = asyncio.get_running_loop().create_future()

    async def nobody(self: LocalCluster, bus: Bus) -> Counter[str]:
        if not connected.done():
            connected.set_result(bus)
        return Counter()

    monkeypatch.setattr(LocalCluster, "_ready_roles", nobody)
    starting = asyncio.create_task(cluster.start())
    try:
        bus = await asyncio.wait_for(connected, 30)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert bus._nc.is_closed
    finally:
        await cluster.stop()
