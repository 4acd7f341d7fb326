"""Probes of a real broker whose writes fail: each stream on disk that stores nothing is found."""

import asyncio
import resource
from functools import partial
from pathlib import Path

import nats
import pytest
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from structlog.testing import capture_logs

from ops.chaos.processes.cluster import Cluster
from shared.bus.bus import Bus
from shared.bus.connection import retry_until
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.login import Login, seed_file
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from workers.keyring import Keyring

# A subject of each stream on disk that can be probed.
SUBJECTS = {
    subjects.REQUESTS_STREAM: subjects.request("demo", "probed"),
    subjects.RESPONSES_STREAM: subjects.response("demo"),
    subjects.CANCELS_STREAM: subjects.cancel("probed"),
    subjects.TOKENS_STREAM: subjects.append("probed"),
    subjects.MEDIA_STREAM: subjects.media("probed"),
    subjects.JOBS_STREAM: subjects.job("probed"),
    subjects.DEAD_STREAM: subjects.dead("engine", "probed"),
    subjects.SCALE_STREAM: subjects.SCALE_PLAN,
    subjects.STEPS_STREAM: subjects.step("tenant", "probed"),
    subjects.BATCHJOBS_STREAM: subjects.batch_job("", "probed"),
    subjects.BATCHES_STREAM: subjects.batch_log("tenant", "probed"),
}


async def states(jetstream: JetStreamContext) -> list[tuple[str, int, int]]:
    infos = [await jetstream.stream_info(stream) for stream in SUBJECTS]
    return [(i.config.name or "", i.state.messages, i.state.last_seq) for i in infos]


async def publish_to_all(jetstream: JetStreamContext) -> None:
    for subject in SUBJECTS.values():
        # A stream of a cluster may still elect its leader.
        await retry_until(30, partial(jetstream.publish, subject, b"1"), (NatsError,), subject)


async def test_each_stream_that_refuses_to_store_is_found(
    own_bus: Bus, own_broker: EmbeddedServer, jetstream: JetStreamContext
) -> None:
    assert await own_bus.streams.probe() == {}
    pid = int(own_broker.pid_file.read_text())
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, unlimited[1]))
    for subject in SUBJECTS.values():
        # The broker does not answer a publish when its write has failed.
        with pytest.raises(NatsTimeoutError):
            await jetstream.publish(subject, b"1", timeout=0.1)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    refusals = await own_bus.streams.probe()
    assert refusals.keys() == SUBJECTS.keys()
    assert {refusal.needs_restart for refusal in refusals.values()} == {True}
    assert "file too large" in refusals[subjects.REQUESTS_STREAM].reason
    own_broker.end_process()
    own_broker.start()
    async with asyncio.timeout(20):
        while await own_bus.streams.probe():
            pass
    await publish_to_all(jetstream)


async def test_a_probe_changes_nothing(own_bus: Bus, jetstream: JetStreamContext) -> None:
    await publish_to_all(jetstream)
    consumer = await own_bus.queues.consume(
        subjects.REQUESTS_STREAM, "coordinator", subjects.REQUESTS_FILTER, 1, 5.0
    )
    before = await states(jetstream)
    assert await own_bus.streams.probe() == {}
    assert await states(jetstream) == before
    delivery = await asyncio.wait_for(consumer.next(), 10)
    assert delivery.data == b"1"


async def test_a_probe_changes_nothing_in_a_cluster(tmp_path: Path) -> None:
    brokers = Cluster(tmp_path)
    await brokers.start()
    bus = await Bus.connect(brokers.url, "probes")
    try:
        await bus.streams.prepare(NatsConfig(replicas=3), DeliveryConfig())
        client = await nats.connect(brokers.members[0].url)
        jetstream = client.jetstream()
        await publish_to_all(jetstream)
        before = await states(jetstream)
        assert await bus.streams.probe() == {}
        assert await states(jetstream) == before
        await client.close()
    finally:
        await bus.close()
        await brokers.stop()


async def test_a_key_that_does_not_permit_a_probe_is_no_refusal(tmp_path: Path) -> None:
    """Coordinators start before the keys are renewed."""
    keyring = Keyring(tmp_path / "keys")
    keyring.complete([])
    accounts = keyring.accounts_file.read_text()
    older = accounts.replace("STREAM.PURGE.*", "STREAM.PURGE.none")
    assert older != accounts
    keyring.accounts_file.write_text(older)
    server = EmbeddedServer(tmp_path / "nats", accounts_file=keyring.accounts_file)
    await asyncio.to_thread(server.start)
    login = Login(server.url, "coordinator", seed_file(keyring.folder, "coordinator"))
    bus = await Bus.connect(login, "coordinator")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    with capture_logs() as logs:
        assert [await bus.streams.probe() for _ in range(2)] == [{}, {}]
    skipped = [log["stream"] for log in logs if log["event"] == "stream_not_probed"]
    # Coordinators may purge logs.
    assert sorted(skipped) == sorted({*SUBJECTS} - {subjects.TOKENS_STREAM})
    await bus.close()
    await asyncio.to_thread(server.stop)
