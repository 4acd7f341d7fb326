"""Connections to the broker: one tenant must not take the places of all others."""

import asyncio
import contextlib
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from shared.bus.accounts import MAX_SUBSCRIPTIONS
from shared.bus.bus import Bus
from shared.bus.embedded_server import CONFIG_DIR, EmbeddedServer
from shared.bus.login import Login, seed_file
from shared.config.schema import NatsConfig
from shared.protocol.permissions import OPERATOR
from tests.shared.bus.test_streams import start_server
from tests.support.broker import running_broker
from tests.support.waiting import until
from workers.keyring import Keyring

DEFAULTS = NatsConfig()
TENANT_CONNECTIONS = DEFAULTS.tenant_connections


@contextlib.contextmanager
def site(folder: Path, settings: NatsConfig = DEFAULTS) -> Iterator[tuple[EmbeddedServer, Keyring]]:
    """A server that the tenants `a` and `b` may use."""
    keyring = Keyring(folder / "keys", settings)
    keyring.complete(["a", "b"])
    with running_broker(folder / "nats", accounts_file=keyring.accounts_file) as server:
        yield server, keyring


async def connect(server: EmbeddedServer, seed: Path) -> Client | None:
    """Connect once. Return None if the server refuses that."""

    async def ignore(_: Exception) -> None:
        pass

    client = Client()
    try:
        await client.connect(
            server.url, nkeys_seed=str(seed), allow_reconnect=False, error_cb=ignore
        )
    except (NatsError, OSError):
        await client.close()
        return None
    return client


def log_of(server: EmbeddedServer) -> str:
    return (server.store_dir / "nats-server.log").read_text()


async def flood(server: EmbeddedServer, seed: Path) -> list[Client]:
    """Open twice as many connections as a tenant may have; return those that are open."""
    opened = []
    for _ in range(2 * TENANT_CONNECTIONS):
        if (client := await connect(server, seed)) is not None:
            opened.append(client)
    return opened


async def test_a_tenant_has_no_more_connections_than_its_own(tmp_path: Path) -> None:
    with site(tmp_path) as (server, keyring):
        opened = await flood(server, keyring.file_of_tenant("a"))
        assert len(opened) == TENANT_CONNECTIONS
        assert "maximum account active connections exceeded" in log_of(server)
        other = await connect(server, keyring.file_of_tenant("b"))
        assert other is not None
        login = Login(server.url, OPERATOR, seed_file(keyring.folder, OPERATOR))
        worker = await Bus.connect(login, "worker")
        await worker.close()
        for client in (*opened, other):
            await client.close()


async def test_a_connection_of_a_tenant_has_a_limit_on_subscriptions(tmp_path: Path) -> None:
    with site(tmp_path) as (server, keyring):
        client = await connect(server, keyring.file_of_tenant("a"))
        assert client is not None
        for number in range(MAX_SUBSCRIPTIONS):
            await client.subscribe(f"pm.tokens.{number}")
        await client.flush()
        assert client.is_connected
        with contextlib.suppress(NatsError, OSError):
            await client.subscribe("pm.tokens.more")
            await client.flush()
        await until(lambda: client.is_closed)
        assert "maximum subscriptions exceeded" in log_of(server)


LIMITED = """
accounts {
  A { users: [{user: a, password: a}], limits: { max_subscriptions: 10 } }
}
no_auth_user: a
"""


@pytest.mark.parametrize("settings", [LIMITED, "max_subscriptions: 10"], ids=["account", "server"])
async def test_the_server_refuses_subscriptions_one_by_one(tmp_path: Path, settings: str) -> None:
    """The limit is on each connection. It stays open, unless its client closes it as nats-py."""
    process, url = start_server(tmp_path, settings)
    try:
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b'CONNECT {"verbose":false,"pedantic":false}\r\n')
            writer.write(b"".join(b"SUB s%d %d\r\n" % (i, i) for i in range(1, 13)) + b"PING\r\n")
            received = (await reader.readuntil(b"PONG\r\n")).decode()
            assert received.count("-ERR 'maximum subscriptions exceeded'") == 2
            writer.write(b"PUB s10 2\r\nhi\r\nPUB s11 2\r\nhi\r\nPING\r\n")
            received = (await reader.readuntil(b"PONG\r\n")).decode()
            assert "MSG s10 10 2" in received
            assert "MSG s11" not in received
            writer.close()
            await writer.wait_closed()
    finally:
        process.kill()
        process.wait()


async def test_a_message_of_a_tenant_has_a_limit(tmp_path: Path) -> None:
    with site(tmp_path, NatsConfig(tenant_payload_mib=1)) as (server, keyring):
        client = await connect(server, keyring.file_of_tenant("a"))
        assert client is not None
        subject = "pm.cancel.x"
        await client.publish(subject, bytes(2**20))
        await client.flush()
        assert client.is_connected
        with contextlib.suppress(NatsError, OSError):
            await client.publish(subject, bytes(2**20 + 1))
            await client.flush()
        await until(lambda: client.is_closed)
        assert "maximum payload" in log_of(server)


NUM_SILENT = 30
SMALL_PENDING_MIB = 8


def peak_mib(server: EmbeddedServer) -> float:
    pid = int(server.pid_file.read_text())
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(line) / 1024


async def test_connections_that_do_not_read_take_little_memory(tmp_path: Path) -> None:
    """The server holds at most `max_pending` for each, and then closes it."""
    folder, config = tmp_path / "nats", tmp_path / "small.conf"
    shipped = (CONFIG_DIR / "nats.conf").read_text()
    config.write_text(re.sub("max_pending: .*", f"max_pending: {SMALL_PENDING_MIB}MB", shipped))
    with running_broker(folder, config_file=config) as server, contextlib.ExitStack() as sockets:
        for _ in range(NUM_SILENT):
            silent = sockets.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            silent.sendall(b'CONNECT {"verbose":false}\r\nSUB flood 1\r\nPING\r\n')
            while not silent.recv(4096).endswith(b"PONG\r\n"):
                pass
        client = Client()
        await client.connect(server.url)
        before = peak_mib(server)
        for _ in range(256):
            await client.publish("flood", bytes(2**18))
            await client.flush()
        closed = log_of(server).count("Slow Consumer Detected")
        assert closed == NUM_SILENT
        # The collector lets the heap grow by half, and each connection has buffers.
        assert peak_mib(server) - before < 2 * NUM_SILENT * SMALL_PENDING_MIB
        await client.close()


async def test_the_server_has_fewer_connections_than_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = TENANT_CONNECTIONS, TENANT_CONNECTIONS
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    with site(tmp_path) as (server, keyring):
        opened = await flood(server, keyring.file_of_tenant("a"))
        # The check whether the server listens has taken a place for a moment.
        assert len(opened) == TENANT_CONNECTIONS // 2
        assert "maximum connections exceeded" in log_of(server)
        for client in opened:
            await client.close()
