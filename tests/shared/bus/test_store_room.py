"""Free space of the broker's stores: small disks, small limits of servers, and refusals."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.js import JetStreamContext, api
from structlog.testing import capture_logs

from shared.bus import store_room
from shared.bus.bus import Bus
from shared.bus.embedded_server import CONFIG_DIR, EmbeddedServer
from shared.bus.login import Login, seed_file
from shared.bus.store_room import StoreRoom, measure_folder, measure_servers, report_room
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import DiskFull, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.full_stores import FullStore, FullStores
from tests.support.broker import running_broker
from tests.support.small_disk import fill_until, mounted_disk
from tests.support.waiting import until
from workers.keyring import Keyring

MIB = 2**20
FULL = FullStore("data/nats", 7 * MIB, 16 * MIB)


def disk_of(total_mib: int, free_mib: int) -> os.statvfs_result:
    sizes = {"f_frsize": 4096, "f_blocks": total_mib * 256, "f_bavail": free_mib * 256}
    return cast(os.statvfs_result, SimpleNamespace(**sizes))


@pytest.mark.parametrize(
    ("percent", "mib", "total_mib", "limit_mib"),
    [
        (5.0, 1024, 10_000, 1024),  # 5 % are 500 MiB
        (5.0, 1024, 100_000, 5000),
        (0.0, 1024, 100_000, 1024),
        (5.0, 0, 10_000, 500),
        (0.0, 0, 10_000, 0),
    ],
)
def test_the_larger_limit_of_a_disk_counts(
    percent: float, mib: int, total_mib: int, limit_mib: int
) -> None:
    config = NatsConfig(min_free_percent=percent, min_free_mib=mib)
    at_limit = measure_folder(Path(), config, lambda _: disk_of(total_mib, limit_mib))
    assert at_limit == []
    if limit_mib:
        below = measure_folder(Path(), config, lambda _: disk_of(total_mib, limit_mib - 1))
        assert below == [FullStore("data/nats", (limit_mib - 1) * MIB, limit_mib * MIB)]


def test_a_store_that_cannot_be_read_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        measure_folder(tmp_path / "missing", NatsConfig())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", 64) as folder:
        yield folder


def test_a_disk_is_full_until_it_has_room_again(small_disk: Path) -> None:
    config = NatsConfig(store_dir=str(small_disk), min_free_mib=16)
    assert measure_folder(small_disk, config) == []
    ballast = fill_until(small_disk, free_bytes=8 * MIB)
    (store,) = measure_folder(small_disk, config)
    assert store.name == str(small_disk)
    assert store.free_bytes <= 8 * MIB < store.min_free_bytes == 16 * MIB
    ballast.unlink()
    assert measure_folder(small_disk, config) == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_room, "PROBE_S", 0.02)
    monkeypatch.setattr(store_room, "READ_S", 0.0)


@pytest.mark.usefixtures("quick")
async def test_workers_refuse_requests_while_an_observer_reports_a_full_store(own_bus: Bus) -> None:
    full: list[FullStore] = []
    room = StoreRoom(own_bus)

    async def measure() -> list[FullStore]:
        return full

    with capture_logs() as logs:
        reporting = asyncio.create_task(report_room(own_bus, measure))
        await room.check()
        full = [FULL]
        await until(room.find_error)
        with pytest.raises(DiskFull) as refused:
            await room.check()
        assert room.num_full == 1
        for part in ("7.0 MiB", "16.0 MiB", "nats.min_free"):
            assert part in refused.value.message
        assert FULL.name not in refused.value.message
        assert refused.value.retryable
        # Heartbeats have the same stream.
        assert await own_bus.heartbeats.read() == []
        assert await own_bus.heartbeats.read_starts() == []
        full = []

        async def has_room() -> bool:
            return await room.find_error() is None

        await until(has_room)
        reporting.cancel()
    events = [log["event"] for log in logs]
    assert events == ["broker_disk_full", "broker_disk_has_room"]
    await room.check()


@pytest.mark.usefixtures("quick")
async def test_an_observer_without_a_measurement_reports_nothing_and_continues(
    own_bus: Bus,
) -> None:
    outcomes: list[list[FullStore] | Unavailable] = [[FULL]] + 3 * [Unavailable("no disk")]

    async def measure() -> list[FullStore]:
        outcome = outcomes.pop(0) if outcomes else []
        if isinstance(outcome, Unavailable):
            raise outcome
        return outcome

    with capture_logs() as logs:
        reporting = asyncio.create_task(report_room(own_bus, measure))
        await until(lambda: any(log["event"] == "broker_disk_has_room" for log in logs))
        reporting.cancel()
    assert [log["event"] for log in logs] == [
        "broker_disk_full",
        "store_not_measured",
        "broker_disk_has_room",
    ]


@pytest.fixture
def small_broker(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that may store 64 MB."""
    config = tmp_path / "nats.conf"
    config.write_text((CONFIG_DIR / "nats.conf").read_text().replace("10GB", "64MB"))
    with running_broker(tmp_path / "nats", config_file=config) as server:
        yield server


async def publish_mib(jetstream: JetStreamContext, subject: str, mib: int) -> None:
    for _ in range(mib):
        await jetstream.publish(subject, bytes(MIB))


async def test_a_server_that_has_used_most_of_its_limit_is_full(
    small_broker: EmbeddedServer,
) -> None:
    bus = await Bus.connect(small_broker.url, "test")
    config = NatsConfig(min_free_mib=40)
    js = bus.connection.js
    await js.add_stream(api.StreamConfig(name="FOREIGN", subjects=["foreign"]))
    assert await measure_servers(bus, config) == []
    await publish_mib(js, "foreign", 32)
    (store,) = await measure_servers(bus, config)
    assert store.min_free_bytes == 40 * MIB
    assert 64_000_000 - 33 * MIB < store.free_bytes < 64_000_000
    assert store.name == bus.connection.nc._server_info["server_name"]
    await js.purge_stream("FOREIGN")
    assert await measure_servers(bus, config) == []
    await bus.close()


async def test_streams_may_fill_what_is_reserved_for_them(small_broker: EmbeddedServer) -> None:
    bus = await Bus.connect(small_broker.url, "test")
    js = bus.connection.js
    own: dict[str, Any] = {"subjects": ["own"], "max_bytes": 36 * MIB}
    await js.add_stream(api.StreamConfig(name="OWN", **own))
    await publish_mib(js, "own", 40)
    assert await measure_servers(bus, NatsConfig(min_free_mib=40)) == []
    await bus.close()


async def test_a_coordinator_measures_and_publishes_with_its_key(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "keys")
    keyring.complete([])
    with running_broker(tmp_path / "nats", accounts_file=keyring.accounts_file) as server:
        login = Login(server.url, "coordinator", seed_file(keyring.folder, "coordinator"))
        bus = await Bus.connect(login, "coordinator")
        await bus.streams.prepare(NatsConfig(), DeliveryConfig())
        assert await measure_servers(bus, NatsConfig()) == []
        await bus.publish_without_id(subjects.FULL_STORES, to_json(FullStores([FULL])))
        assert await StoreRoom(bus).find_error() is not None
        await bus.close()


async def test_a_message_of_a_newer_version_refuses_nothing(own_bus: Bus) -> None:
    await own_bus.publish_without_id(subjects.FULL_STORES, b'{"stores": 7}')
    assert await StoreRoom(own_bus).find_error() is None
