"""All roles on one machine: how it ends."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.bus.bus import Bus
from shared.config.schema import Config, NatsConfig
from shared.errors import Unavailable
from shared.protocol.messages import Heartbeat, StartReport
from workers.roles import WorkerSpec
from workers.supervisor import cluster as cluster_module
from workers.supervisor import start
from workers.supervisor.cluster import LocalCluster, Process
from workers.supervisor.preloader import ForkedProcess, Preloader
from workers.supervisor.start import Quiet, Watched


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

    monkeypatch.setattr(start, "read_signs", nobody)
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
    cluster.show = shown = Shown()
    starting = asyncio.create_task(cluster.start())
    await asyncio.sleep(0)
    assert shown.titles == ["coordinator"]
    try:
        while not (pids := cluster.pids("coordinator")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(Unavailable, match=r"1 s \(start_silence_s\): coordinator \(last: star"):
            await starting
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


class Forks(LocalCluster):
    """A cluster whose processes come from `spawned`, and end at once."""

    spawned: list[Process | OSError]
    watched: list[Watched | None]

    async def _spawn(self, spec: WorkerSpec) -> Process:
        self.watched.append(self._watched.get(0))
        match self.spawned.pop(0):
            case OSError() as error:
                raise error
            case process:
                return process


def ended(pid: int) -> ForkedProcess:
    process = ForkedProcess(pid)
    process.end(1)
    return process


async def supervise(cluster: Forks) -> None:
    """Supervise a worker until it was spawned as often as `spawned` says."""
    with pytest.raises(IndexError):
        await asyncio.wait_for(cluster._supervise(0, WorkerSpec("engine", "demo")), 10)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    monkeypatch.setattr(cluster_module, "FIRST_RESTART_S", 0.001)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        cluster = Forks(Config({}), None, [WorkerSpec("engine", "demo")])
        cluster.preloader = Preloader(ours, os.getpid())
        cluster.watched = []
        yield cluster


async def test_the_preloader_is_watched_until_the_first_process(forks: Forks) -> None:
    """Later processes may be executed without it, and it does not work for them."""
    first, second = ended(1), ended(2)
    forks.spawned = [first, second]
    await supervise(forks)
    assert forks.watched == [forks.preloader, first, second]


async def test_a_process_that_linux_refuses_is_tried_again(forks: Forks) -> None:
    process = ended(1)
    forks.spawned = [BlockingIOError(11, "Resource temporarily unavailable"), OSError(12), process]
    with capture_logs() as logs:
        await supervise(forks)
    assert [(log["event"], log["role"]) for log in logs] == [
        ("worker_not_started", "engine"),
        ("worker_not_started", "engine"),
        ("worker_ended", "engine"),
    ]
    assert "Resource temporarily unavailable" in logs[0]["reason"]
    assert logs[1]["retry_in_s"] == 2 * logs[0]["retry_in_s"]


async def test_only_its_owner_can_read_a_log_that_a_worker_begins(tmp_path: Path) -> None:
    log_file = tmp_path / "logs" / "workers.log"
    cluster = LocalCluster(Config({}), None, [], "nats://127.0.0.1:9", log_file)
    process = await cluster._spawn(WorkerSpec("coordinator"))
    process.kill()
    await process.wait()
    assert log_file.stat().st_mode & 0o777 == 0o600
