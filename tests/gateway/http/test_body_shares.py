"""Unfinished bodies of one tenant leave room for other tenants' bodies."""

import asyncio
import contextlib
from typing import Any

import pytest

from tests.gateway.conftest import Gateway, Start
from workers.gateway.http.auth import digest

KEYS: list[dict[str, Any]] = [
    {"name": name, "sha256": digest(f"key-{name}"), "tenant": tenant}
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b", "b"), ("c", "c"))
]
BODY_BYTES = 2**20
MAX_CONNECTIONS = 80


def head(key: str | None, num_bytes: int) -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {num_bytes}\r\n{authorization}\r\n"
    ).encode()


class Client:
    """A connection on which a body is sent, whole or in part."""

    def __init__(self, gateway: Gateway) -> None:
        self._port = int(gateway.url.rpartition(":")[2])

    async def send(self, key: str | None, num_bytes: int, *, of: int = BODY_BYTES) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(head(key, of) + b" " * num_bytes)
        with contextlib.suppress(ConnectionError):  # It may have been refused already.
            await self._writer.drain()

    async def status(self) -> int:
        async with asyncio.timeout(60):
            return int((await self._reader.read(12))[9:12])

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@pytest.fixture
def served(another: Start) -> Gateway:
    return another(
        api_keys=KEYS,
        page=False,
        max_body_mib=1,
        max_connections=MAX_CONNECTIONS,
        body_timeout_s=300,
    )


async def status_of(gateway: Gateway, key: str | None, num_bytes: int) -> int:
    """Return the status of the answer to a whole body, which is no JSON."""
    client = Client(gateway)
    await client.send(key, num_bytes, of=num_bytes)
    try:
        return await client.status()
    finally:
        await client.close()


async def first_refused(gateway: Gateway, keys: list[str], num_bytes: int) -> list[Client]:
    """Begin bodies without an end until one is refused; return all that are still open."""
    clients: list[Client] = []
    waiting: dict[asyncio.Task[int], Client] = {}
    for i in range(MAX_CONNECTIONS - 10):
        clients.append(Client(gateway))
        await clients[-1].send(keys[i % len(keys)], num_bytes)
        waiting[asyncio.create_task(clients[-1].status())] = clients[-1]
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        if done:
            assert {task.result() for task in done} == {503}
            break
    else:
        done, _ = await asyncio.wait(waiting, timeout=60)
    for task, client in waiting.items():
        task.cancel()
        if task in done:
            await client.close()
    await asyncio.gather(*waiting, return_exceptions=True)
    return [client for task, client in waiting.items() if task not in done]


@pytest.mark.parametrize("keys", [["key-a1"], ["key-a1", "key-a2"]], ids=["one key", "two keys"])
@pytest.mark.parametrize("num_bytes", [BODY_BYTES - 1, 1], ids=["large", "small"])
async def test_unfinished_bodies_of_one_tenant_refuse_no_other(
    served: Gateway, keys: list[str], num_bytes: int
) -> None:
    held = await first_refused(served, keys, num_bytes)
    try:
        assert held
        for key in ("key-b", "key-c"):
            assert await status_of(served, key, BODY_BYTES - 1) == 400
    finally:
        for client in held:
            await client.close()
    # The reserved memory is free again.
    async with asyncio.timeout(60):
        while await status_of(served, keys[0], BODY_BYTES - 1) != 400:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("key", [None, "key-x"], ids=["no key", "a wrong key"])
async def test_nothing_of_a_body_is_waited_for_without_a_key(
    served: Gateway, key: str | None
) -> None:
    client = Client(served)
    await client.send(key, 0)
    assert await client.status() == 401
    await client.close()
