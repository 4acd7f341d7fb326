"""A server of a cluster that stores nothing after its disk was full, as a coordinator sees it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ops.chaos.processes.cluster import Cluster
from shared.bus.bus import Bus
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from shared.telemetry.metrics import Metrics
from tests.support.small_disk import fill_until, mounted_disk
from tests.support.waiting import until
from workers.coordinator import replica_watch
from workers.coordinator.replica_watch import ReplicaWatch


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three servers, each with a small disk."""
    cluster = Cluster(tmp_path)
    with contextlib.ExitStack() as disks:
        for member in cluster.members:
            disks.enter_context(mounted_disk(member.store_dir, 96))
        await cluster.start()
        yield cluster
        await cluster.stop()


def num_lagging(metrics: Metrics) -> dict[str, float]:
    series = metrics.snapshot().series
    return {s.labels["server"]: s.value for s in series if s.name == "replicas_lagging"}


async def publish(bus: Bus, count: int) -> None:
    for number in range(count):
        name = f"{number:064}"
        await bus.publish_without_id(subjects.media(name), os.urandom(9000))


async def test_a_server_that_does_not_store_is_named_until_it_follows_again(
    brokers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_watch, "LOOK_S", 0.1)
    monkeypatch.setattr(replica_watch, "PATIENCE_S", 1.0)
    bus = await Bus.connect(brokers.url, "watch")
    await bus.streams.prepare(NatsConfig(replicas=3), DeliveryConfig())
    leader = await brokers.leader_of(subjects.MEDIA_STREAM)
    assert leader is not None
    full = (leader + 1) % 3
    server = f"n{full}"
    metrics = Metrics("coordinator", "c")
    with capture_logs() as logs:
        watching = asyncio.create_task(ReplicaWatch(bus, metrics).run())
        ballast = await asyncio.to_thread(fill_until, brokers.members[full].store_dir)
        await publish(bus, 20)
        await until(lambda: num_lagging(metrics).get(server))
        ballast.unlink()
        # It stores nothing more, although the stream does.
        await publish(bus, 20)
        await until(lambda: any(log["event"] == "replicas_lag" for log in logs))
        assert num_lagging(metrics)[server] > 0
        assert subjects.MEDIA_STREAM not in await bus.streams.probe()

        await brokers.terminate(full)
        await brokers.restart(full)
        await until(lambda: not any(num_lagging(metrics).values()))
        watching.cancel()
    late = {log["server"] for log in logs if log["event"] == "replicas_lag"}
    assert server in late
    assert any(log["event"] == "replicas_follow_again" for log in logs)
    await bus.close()


async def test_streams_without_replicas_are_not_watched(own_bus: Bus) -> None:
    metrics = Metrics("coordinator", "c")
    await ReplicaWatch(own_bus, metrics).run()
    assert num_lagging(metrics) == {}
