"""All roles on one machine: how it ends."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from shared.bus.bus import Bus
from shared.config.schema import Config, NatsConfig
from shared.errors import Unavailable
from shared.protocol.messages import Heartbeat, StartReport
from tests.support.waiting import until
from workers.roles import WorkerSpec
from workers.supervisor import start
from workers.supervisor.cluster import LocalCluster
from workers.supervisor.preloader import ForkedProcess, Preloader
from workers.supervisor.start import Quiet


async def test_no_worker_misses_the_broker_when_the_start_is_broken_off(
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

    monkeypatch.setattr(start, "read_signs", nobody)
    starting = asyncio.create_task(cluster.start())
    try:
        bus = await asyncio.wait_for(connected, 30)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert bus.connection.nc.is_closed
    finally:
        await cluster.stop()


async def test_a_worker_that_stands_still_ends_the_start(tmp_path: Path) -> None:
    nats = NatsConfig(port=0, store_dir=str(tmp_path))
    config = Config({}, nats=nats, start_silence_s=1.0)
    log_file = tmp_path / "workers.log"
    cluster = LocalCluster(config, None, [WorkerSpec("coordinator")], log_file=log_file)
    cluster.show = progress = Shown()
    workers_before: list[int] = []
    cluster.when_connectable = lambda: workers_before.append(
        len(cluster.supervisor.slots(WorkerSpec("coordinator")))
    )
    starting = asyncio.create_task(cluster.start())
    await asyncio.sleep(0)
    assert progress.titles == ["coordinator"]
    try:
        pids = await until(lambda: cluster.pids("coordinator"))
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(Unavailable, match=r"1 s \(start_silence_s\): coordinator \(last: star"):
            await starting
        # Commands find the configuration of the cluster during the start.
        assert workers_before == [0]
    finally:
        os.kill(pids[0], signal.SIGCONT)
        await cluster.stop()


async def test_processes_have_groups_of_their_own_within_the_session(tmp_path: Path) -> None:
    """Ctrl-C is for the supervisor alone, and niceness counts between all of them."""
    config = Config({}, nats=NatsConfig(port=0, store_dir=str(tmp_path)))
    log_file = tmp_path / "workers.log"
    cluster = LocalCluster(config, None, [WorkerSpec("coordinator")], log_file=log_file)
    await cluster.start()
    try:
        broker = int((tmp_path / "nats-server.pid").read_text())
        pids = [broker, *cluster.pids("coordinator")]
        assert [os.getpgid(pid) for pid in pids] == pids
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}
    finally:
        await cluster.stop()


class Shown(Quiet):
    def __init__(self) -> None:
        self.titles: list[str] = []

    def progress(self, title: str, text: str) -> None:
        self.titles.append(title)


async def test_the_preloader_is_watched_until_the_first_process() -> None:
    """Later processes may be executed without it, and it does not work for them."""
    engine = WorkerSpec("engine", "demo")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        preloader = Preloader(ours, os.getpid())
        cluster = LocalCluster(
            Config({}), None, [engine, WorkerSpec("gateway")], preloader=preloader
        )
        assert cluster.watched(0) is preloader
        assert cluster.watched(1) is None
        process = ForkedProcess(1)
        cluster.supervisor.processes[0] = process
        assert cluster.watched(0) is process
