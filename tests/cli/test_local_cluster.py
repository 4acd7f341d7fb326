"""All roles on one machine: how it ends."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from shared.bus.bus import Bus
from shared.config import Config, NatsConfig
from shared.errors import Unavailable
from shared.protocol.messages import Heartbeat, StartReport
from workers.cli import readiness
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

    async def nobody(bus: Bus) -> tuple[list[Heartbeat], list[StartReport]]:
        if not connected.done():
            connected.set_result(bus)
        return [], []

    monkeypatch.setattr(readiness, "read_signs", nobody)
    starting = asyncio.create_task(cluster.start())
    try:
        bus = await asyncio.wait_for(connected, 30)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert bus._nc.is_closed
    finally:
        await cluster.stop()


async def test_a_worker_that_stands_still_ends_the_start(tmp_path: Path) -> None:
    nats = NatsConfig(port=0, store_dir=str(tmp_path))
    config = Config({}, nats=nats, start_silence_s=1.0)
    log_file = tmp_path / "workers.log"
    cluster = LocalCluster(config, None, [WorkerSpec("coordinator")], log_file=log_file)
    starting = asyncio.create_task(cluster.start())
    try:
        while not (pids := cluster.pids("coordinator")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(Unavailable, match=r"1 s \(start_silence_s\): coordinator \(last: star"):
            await starting
    finally:
        os.kill(pids[0], signal.SIGCONT)
        await cluster.stop()
