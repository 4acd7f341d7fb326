"""Required server settings, stream creation and recovery."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg
from nats.js.api import StorageType, StreamConfig

from shared.bus import queues
from shared.bus.bus import Bus
from shared.bus.connection import REPLY_TIMEOUT_S
from shared.bus.embedded_server import EmbeddedServer, find_binary, free_port
from shared.bus.server_settings import NEXT_REPLY_TIMEOUT_S, check_server
from shared.bus.streams import create_missing, durable_streams, streams_of_tenant
from shared.client import ask
from shared.config.schema import AgentConfig, BatchConfig, DeliveryConfig, NatsConfig
from shared.errors import ConfigError, Overloaded
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.permissions import SERVER_SETTINGS
from shared.protocol.requests import GenerateRequest, Message

SETTINGS_EXPORT = """
system_account: SYS
accounts {
  SYS { exports: [{ service: "$SYS.REQ.SERVER.PING.JSZ", response_type: stream }] }
  PM {
    jetstream: enabled
    users: [{ user: pm, password: pm }]
    imports: [{ service: { account: SYS, subject: "$SYS.REQ.SERVER.PING.JSZ" } }]
  }
}
no_auth_user: pm
"""


def start_server(folder: Path, settings: str) -> tuple[subprocess.Popen[bytes], str]:
    port, config = free_port(), folder / "nats.conf"
    config.write_text(f"host: 127.0.0.1\nport: {port}\n{settings}")
    process = subprocess.Popen([find_binary(), "-c", str(config)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"nats://127.0.0.1:{port}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("", "JetStream"),
        ('jetstream { store_dir: "STORE" }', "does not report"),
        ('jetstream { store_dir: "STORE" }' + SETTINGS_EXPORT, "sync_interval"),
        ('max_payload: 4KB\njetstream { store_dir: "STORE" }', "max_payload"),
        (
            'jetstream { store_dir: "STORE", sync_interval: always, max_file_store: 1GB }'
            + SETTINGS_EXPORT,
            "max_file_store",
        ),
    ],
    ids=["no JetStream", "silent", "no sync", "small messages", "small store"],
)
async def test_a_server_without_the_required_settings_is_refused(
    tmp_path: Path, settings: str, named: str
) -> None:
    process, url = start_server(tmp_path, settings.replace("STORE", str(tmp_path / "js")))
    bus = await Bus.connect(url, "test")
    try:
        with pytest.raises(ConfigError, match=named):
            await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    finally:
        await bus.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("configs", "setting"),
    [
        (
            durable_streams(DeliveryConfig(), AgentConfig(), BatchConfig(), 1)[:1],
            "the limits of delivery",
        ),
        (
            streams_of_tenant("acme", NatsConfig(), DeliveryConfig()),
            "nats.tenant_request_mib",
        ),
    ],
    ids=["all", "one tenant"],
)
async def test_a_stream_without_room_names_the_setting(
    tmp_path: Path, configs: list[StreamConfig], setting: str
) -> None:
    process, url = start_server(
        tmp_path, f'jetstream {{ store_dir: "{tmp_path / "js"}", max_file_store: 1MB }}'
    )
    nc = await nats.connect(url)
    try:
        with pytest.raises(ConfigError, match=f"raise max_file_store or lower {setting}$"):
            await create_missing(nc, configs, 1)
    finally:
        await nc.close()
        process.kill()
        process.wait()


async def test_a_server_that_is_too_old_is_refused(
    broker: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.server_settings.MIN_SERVER_VERSION", (99, 0, 1))
    bus = await Bus.connect(broker.url, "test")
    with pytest.raises(
        ConfigError, match=r"^nats-server \d+\.\d+\.\d+ is too old: 99\.0\.1 is required$"
    ) as refused:
        await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    assert refused.value.field == "nats.url"
    await bus.close()


async def test_unchecked_accepts_a_server_that_hides_its_settings(tmp_path: Path) -> None:
    process, url = start_server(tmp_path, f'jetstream {{ store_dir: "{tmp_path / "js"}" }}')
    bus = await Bus.connect(url, "test")
    try:
        await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    finally:
        await bus.close()
        process.kill()
        process.wait()


async def test_more_replicas_than_servers_are_refused(broker: EmbeddedServer) -> None:
    bus = await Bus.connect(broker.url, "test")
    with pytest.raises(ConfigError, match="replicas"):
        await bus.streams.prepare(NatsConfig(replicas=3), DeliveryConfig())
    await bus.close()


async def test_a_start_waits_for_space_that_another_stream_gives_back(
    own_broker: EmbeddedServer,
) -> None:
    bus = await Bus.connect(own_broker.url, "test")
    js, room = bus.connection.js, 10**10 - 2**20  # of max_file_store
    await js.add_stream(name="OTHER", subjects=["other"], max_bytes=room)
    advisories = await bus.connection.nc.subscribe("$JS.EVENT.ADVISORY.API")
    preparing = asyncio.create_task(bus.streams.prepare(NatsConfig(), DeliveryConfig()))
    while b"insufficient storage" not in (await advisories.next_msg(30)).data:
        pass
    await js.delete_stream("OTHER")
    await preparing
    await bus.close()


async def test_servers_that_reply_late_are_waited_for(tmp_path: Path) -> None:
    """Three servers of a busy cluster, played by a client of a server without their service."""
    process, url = start_server(tmp_path, f'jetstream {{ store_dir: "{tmp_path / "js"}" }}')
    bus, servers = await Bus.connect(url, "test"), await nats.connect(url)

    async def reply(msg: Msg) -> None:
        for name in "abc":
            data = {"server": {"name": name}, "data": {"config": {"sync_always": True}}}
            await servers.publish(msg.reply, to_json(data))
            await asyncio.sleep(2 * NEXT_REPLY_TIMEOUT_S)

    try:
        await servers.subscribe(SERVER_SETTINGS, cb=reply)
        await servers.flush()
        await check_server(bus.connection, NatsConfig(replicas=3))
    finally:
        await servers.close()
        await bus.close()
        process.kill()
        process.wait()


async def test_a_full_queue_refuses_at_once_with_a_retry_delay(
    own_broker: EmbeddedServer,
) -> None:
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig(max_queued=2))
    request = GenerateRequest("demo", [Message("user", "hello")])
    for number in range(2):
        await bus.publish_without_id(subjects.request("demo", str(number)), b"x")
    began = time.monotonic()
    with pytest.raises(Overloaded, match="try again in 1 s") as caught:
        await anext(ask(bus, request, "third"))
    assert time.monotonic() - began < 5
    assert caught.value.retry_after_s == 1.0
    await bus.close()


async def test_prepare_waits_for_a_slow_broker(
    own_broker: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `prepare` has a longer deadline than other requests.
    monkeypatch.setattr(queues, "BROKER_DEADLINE_S", 0.5)
    pid = int(own_broker.pid_file.read_text())
    bus = await Bus.connect(own_broker.url, "test")
    os.kill(pid, signal.SIGSTOP)
    try:
        preparing = asyncio.create_task(
            bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
        )
        await asyncio.sleep(REPLY_TIMEOUT_S + 0.5)
        assert not preparing.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    await preparing
    await bus.close()


async def test_streams_in_memory_are_restored_after_a_restart(own_broker: EmbeddedServer) -> None:
    beat = Heartbeat("engine", "engine-1", "0", 1, [], {})
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    await bus.heartbeats.publish("engine-1", to_json(beat))
    own_broker.kill()
    own_broker.start()
    await bus.heartbeats.publish("engine-1", to_json(beat))
    assert await bus.heartbeats.lag_s("engine-1", observer="engine-1") == 0
    assert await bus.heartbeats.lag_s("engine-2", observer="engine-1") == math.inf
    assert await bus.heartbeats.read() == [beat]
    await bus.close()


async def _wait_until_synced(broker: EmbeddedServer, since_ns: int) -> None:
    """Wait until the server has written its state of the consumer after `since_ns`.

    It may have written all of it just before, and then writes nothing for seconds.
    """
    for _ in range(100):
        files = [file.stat().st_mtime_ns for file in broker.store_dir.rglob("o.dat")]
        if files and max(files) > since_ns:
            break
        await asyncio.sleep(0.05)


async def test_batched_acks_reach_a_restarted_server(
    own_broker: EmbeddedServer,
) -> None:
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    queue = subjects.REQUESTS_STREAM, "test", subjects.REQUESTS_FILTER
    consumer = await bus.queues.consume(*queue, 64, 30.0)
    names = [str(number) for number in range(64)]
    to = [subjects.request("demo", f"{name}@t") for name in names]
    await asyncio.gather(*(bus.publish_without_id(subject, b"") for subject in to))
    deliveries = [await consumer.next() for _ in names]
    await _wait_until_synced(own_broker, time.time_ns())
    first = [asyncio.create_task(delivery.ack()) for delivery in deliveries[:32]]
    await asyncio.sleep(0.001)  # some are sent, some wait
    own_broker.kill()
    second = [asyncio.create_task(delivery.ack()) for delivery in deliveries[32:]]
    own_broker.start()
    await asyncio.gather(*first, *second)
    depth = await bus.figures.depth(subjects.REQUESTS_STREAM, "test")
    assert (depth.num_pending, depth.num_in_flight) == (0, 0)
    await bus.close()


ALONE = pytest.param("", id="alone")
IN_A_CLUSTER = pytest.param(
    'server_name: a\njetstream { store_dir: "STORE" }\n'
    'cluster { name: "c", listen: "127.0.0.1:-1", routes: ["nats://127.0.0.1:9"] }',
    id="in a cluster",
)


@pytest.fixture
async def bus_of_server(tmp_path: Path, settings: str) -> AsyncIterator[Bus]:
    """A connection to a server with these settings."""
    process, url = start_server(tmp_path, settings.replace("STORE", str(tmp_path / "js")))
    try:
        bus = await Bus.connect(url, "test")
        yield bus
        await bus.close()
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.parametrize("settings", [ALONE, IN_A_CLUSTER])
async def test_tasks_are_in_memory_only_where_the_broker_runs_alone(
    bus_of_server: Bus, settings: str
) -> None:
    """In a cluster, another server would not notice the restart of the one that has lost them."""
    streams = bus_of_server.streams
    streams.configure(NatsConfig(), DeliveryConfig(), AgentConfig(), BatchConfig())
    stored = {config.name: config.storage for config in streams.configs}
    assert stored[subjects.STAGES_STREAM] == (StorageType.FILE if settings else StorageType.MEMORY)


@pytest.mark.parametrize("settings", [ALONE, IN_A_CLUSTER])
async def test_only_a_server_in_a_cluster_has_replicas_that_may_lag(
    bus_of_server: Bus, settings: str
) -> None:
    waiting = asyncio.create_task(bus_of_server.wait_for_replicas())
    await asyncio.sleep(0)
    assert waiting.done() is not bool(settings)
    await waiting
