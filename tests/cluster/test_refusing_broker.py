"""An embedded broker with failed writes is restarted when its disk has room."""

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from nats.errors import Error as NatsError

from shared.bus.bus import Bus
from shared.protocol import subjects
from tests.cluster.conftest import CONFIG, Cluster, living, start_cluster, stop_cluster
from tests.support.small_disk import fill_until, mounted_disk
from tests.support.waiting import until

DISK_MIB = 64
MIB = 2**20
# Without these limits, requests are refused before the disk is full.
NO_LIMITS = CONFIG + "nats: {min_free_percent: 0, min_free_mib: 0}\n"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of the broker's store, on a separate file system."""
    with mounted_disk(tmp_path / "data" / "nats", DISK_MIB) as folder:
        yield folder


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    cluster = await asyncio.to_thread(start_cluster, folder, NO_LIMITS)
    try:
        bus = await Bus.connect(cluster.url, "test")
        (gateway,) = await living(bus, "gateway")
        await bus.close()
        async with httpx.AsyncClient(base_url=gateway.url or "", timeout=60) as http:
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
            yield cluster, http
    finally:
        assert await asyncio.to_thread(stop_cluster, cluster) == 0


async def publish_media(bus: Bus, count: int) -> None:
    """Publish enough that the broker has to open further files."""
    for number in range(count):
        await bus.connection.js.publish(subjects.media(f"{number:064}"), os.urandom(MIB))


async def wait_for_status(http: httpx.AsyncClient, status: str) -> None:
    async with asyncio.timeout(90):
        while (await http.get("/ready")).json()["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def test_a_full_disk_that_has_room_again_is_written_again(
    small_disk: Path, tmp_path: Path
) -> None:
    async with running(tmp_path) as (cluster, http):
        ballast = await asyncio.to_thread(fill_until, small_disk)
        # The last page of each file still has room.
        while (status := (await http.post("/v1/chat/completions", json=CHAT)).status_code) == 200:
            pass
        assert status in (503, 504)
        await wait_for_status(http, "broker does not store")
        assert (await http.get("/ready")).status_code == 503
        # Without room, a restart would not help.
        assert "broker_restarted" not in cluster.log.read_text()
        ballast.unlink()
        await wait_for_status(http, "ok")
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        log = cluster.log.read_text()
    for event in ("broker_refuses_to_store", "broker_restarted", "broker_stores_again"):
        assert log.count(f'"{event}"') == 1, event


async def test_a_broker_that_had_no_descriptors_left_is_restarted(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, http):
        bus = await Bus.connect(cluster.url, "test")
        pid = int((tmp_path / "data" / "nats" / "nats-server.pid").read_text())
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))
        with pytest.raises(NatsError):
            await publish_media(bus, 256)
        await bus.close()
        await until(lambda: "broker_restarted" in cluster.log.read_text())
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
