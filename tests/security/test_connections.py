"""Connections to the broker: one tenant must not take the places of all others."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from shared.bus.accounts import MAX_SUBSCRIPTIONS
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.login import Login, seed_file
from shared.protocol.permissions import OPERATOR
from tests.support.broker import running_broker
from tests.support.waiting import until
from workers.keyring import TENANT_CONNECTIONS, Keyring


@contextlib.contextmanager
def site(folder: Path) -> Iterator[tuple[EmbeddedServer, Keyring]]:
    """A server that the tenants `a` and `b` may use."""
    keyring = Keyring(folder / "keys")
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
