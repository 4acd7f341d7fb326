"""Connections of strangers and of busy tenants leave places for other tenants, on real sockets."""

import asyncio
import contextlib
import json
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Gateway, Start
from tests.gateway.http.test_connection import (
    HEALTH,
    IN_FLIGHT,
    REFUSED,
    Connection,
    begin_uploads,
    connect,
    get,
    leave,
    metric,
    num_files,
    with_key,
)
from tests.gateway.http.test_middleware import certificate, check_error
from workers.gateway.http.auth import digest

DISPLACED = "pagemill_http_connections_displaced_total"
KEYS: list[dict[str, Any]] = [
    {"name": name, "sha256": digest(f"key-{name}"), "rights": ["requests", "metrics"]}
    for name in ("a", "b")
]
MODELS = HEALTH.replace(b"/health", b"/v1/models")


async def connect_from(address: str, gateway: Gateway) -> Connection:
    port = int(gateway.url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def check_health(connection: Connection) -> bool:
    """Return whether the gateway still serves the connection."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        return (await get(connection))[0].startswith(b"HTTP/1.1 200")
    return False


@pytest.mark.parametrize("is_spread", [False, True], ids=["one address", "many addresses"])
async def test_a_crowd_of_strangers_locks_no_tenant_out(another: Start, is_spread: bool) -> None:
    gateway = another(api_keys=KEYS, page=False, header_timeout_s=120)
    ((_, upload),) = await begin_uploads(gateway, 1, "a")
    crowd = []
    for i in range(1100):
        address = f"127.0.{1 + i // 250}.{1 + i % 250}" if is_spread else "127.0.0.1"
        crowd.append(await connect_from(address, gateway))
    for _ in range(2):
        for key in ("a", "b"):
            tenant = await connect(gateway)
            head, _ = await get(tenant, with_key(key, MODELS))
            assert head.startswith(b"HTTP/1.1 200")
            await leave(tenant)
        await asyncio.gather(*map(check_health, crowd))
    tenant = await connect(gateway)
    assert await metric(tenant, DISPLACED, key="a") >= 1 + 1100 - 1024
    assert await metric(tenant, REFUSED, key="a") == 0
    assert await metric(tenant, IN_FLIGHT, key="a") >= 2  # The upload has not been closed.
    await leave(tenant, upload, *crowd)


async def test_silent_handshakes_lock_no_tenant_out(another: Start, tmp_path: Path) -> None:
    trust = await certificate(tmp_path)
    gateway = another(
        api_keys=KEYS, page=False, tls_cert="cert.pem", tls_key="key.pem", max_connections=16
    )
    before = num_files(gateway)
    silent = [await connect(gateway) for _ in range(48)]
    tenant = await connect(gateway, trust)
    assert (await get(tenant, with_key("a", MODELS)))[0].startswith(b"HTTP/1.1 200")
    assert await metric(tenant, DISPLACED, key="a") == 33
    assert num_files(gateway) <= before + 16
    for reader, _ in silent[:33]:
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    await leave(tenant, *silent)


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
async def test_requests_of_one_tenant_lock_no_other_out(
    another: Start, tmp_path: Path, is_tls: bool
) -> None:
    trust: ssl.SSLContext | None = None
    tls = {}
    if is_tls:
        trust = await certificate(tmp_path)
        tls = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
    gateway = another(api_keys=KEYS, page=False, max_connections=16, **tls)
    uploads = []
    for head, connection in await begin_uploads(gateway, 16, "a", trust):
        if head.startswith(b"HTTP/1.1 100"):
            uploads.append(connection)
            continue
        assert head.startswith(b"HTTP/1.1 503")
        (length,) = re.findall(rb"content-length: (\d+)", head)
        body = await connection[0].readexactly(int(length))
        check_error(body, "overloaded")
        assert "gateway.max_connections" in json.loads(body)["error"]["message"]
        await leave(connection)
    # Three quarters of the twelve places of tenants.
    assert len(uploads) == 9
    # New connections displace no request in progress.
    strangers = [await connect(gateway, trust) for _ in range(16)]
    other = await connect(gateway, trust)
    assert (await get(other, with_key("b", MODELS)))[0].startswith(b"HTTP/1.1 200")
    assert await metric(other, IN_FLIGHT, key="b") == 9 + 1
    await leave(other)
    await leave(*uploads, *strangers)


async def test_without_keys_an_idle_connection_closes_for_a_new_one(another: Start) -> None:
    gateway = another(max_connections=4)
    ((_, busy),) = await begin_uploads(gateway, 1)
    idle = []
    for _ in range(3):
        idle.append(await connect(gateway))
        await get(idle[-1])
    late = await connect(gateway)
    assert (await get(late))[0].startswith(b"HTTP/1.1 200")
    assert await idle[0][0].read() == b""
    assert (await get(idle[1]))[0].startswith(b"HTTP/1.1 200")
    assert await metric(late, DISPLACED) == 1
    assert await metric(late, REFUSED) == 0
    await leave(busy, late, *idle)


async def test_idle_connections_have_little_time_while_places_are_scarce(another: Start) -> None:
    gateway = another(max_connections=4)
    idle = [await connect(gateway) for _ in range(4)]
    for connection in [*idle, *idle]:  # All have been accepted before the second round.
        await get(connection)
    async with asyncio.timeout(20):  # Otherwise it is 30 s.
        assert await idle[0][0].read() == b""
    await leave(*idle)
