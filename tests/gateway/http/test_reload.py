"""Keys of a gateway that runs, when its configuration changes."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import yaml

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from tests.cluster.conftest import Cluster
from tests.gateway.conftest import start_gateway_at
from tests.gateway.http.test_body_shares import Client
from tests.support.waiting import until
from workers.gateway.http.auth import digest, make_key

OLD, NEW = make_key(), make_key()


def tree(*keys: str, **gateway: Any) -> dict[str, Any]:
    entries = [{"name": f"k{i}", "sha256": digest(key)} for i, key in enumerate(keys)]
    return {
        "models": {"demo": {"path": "x"}},
        "gateway": {"port": 0, "api_keys": entries, **gateway},
    }


async def test_keys_change_without_a_restart(broker: EmbeddedServer, tmp_path: Path) -> None:
    gateway = start_gateway_at(broker.url, tree(OLD), tmp_path, forked=False)
    file = tmp_path / "gateway.yaml"

    async def status(key: str | None, host: str = "localhost") -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        got = await http.get("/v1/models", headers={"host": host, **headers})
        return got.status_code

    async def reloaded(new: dict[str, Any] | str, event: str) -> None:
        before = gateway.log.read_text().count(event)
        file.write_text(new if isinstance(new, str) else yaml.safe_dump(new))
        gateway.process.send_signal(signal.SIGHUP)
        await until(lambda: gateway.log.read_text().count(event) != before)

    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        try:
            assert [await status(OLD), await status(NEW)] == [200, 401]
            await reloaded(tree(NEW), '"reloaded"')
            assert [await status(OLD), await status(NEW)] == [401, 200]
            # An error in the file leaves the keys as they are.
            await reloaded("gateway: {api_keys: 1}", '"not_reloaded"')
            await reloaded(tree(listen="0.0.0.0"), '"not_reloaded"')
            assert [await status(OLD), await status(NEW)] == [401, 200]
            # Without keys, web pages are kept out from then on.
            await reloaded(tree(max_connections=7), '"reloaded"')
            assert '"gateway.max_connections"' in gateway.log.read_text()
            assert [await status(None), await status(None, "evil.example")] == [200, 421]
            await reloaded(tree(OLD), '"reloaded"')
            assert [await status(OLD, "evil.example"), await status(None)] == [200, 401]
        finally:
            assert gateway.stop(signal.SIGTERM) == 0


async def test_new_keys_divide_the_room_for_bodies(broker: EmbeddedServer, tmp_path: Path) -> None:
    gateway = start_gateway_at(broker.url, tree(max_connections=8), tmp_path, forked=False)
    clients = [Client(gateway) for _ in range(4)]
    try:
        (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(tree(OLD, NEW, max_connections=8)))
        gateway.process.send_signal(signal.SIGHUP)
        await until(lambda: '"reloaded"' in gateway.log.read_text())
        # A tenant of two has half of the four unfinished bodies.
        for client in clients[:3]:
            await client.send(OLD, 1)
        tasks = [asyncio.create_task(client.status()) for client in clients[:3]]
        first, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in first] == [503]
        for task in others:
            task.cancel()
        await clients[3].send(NEW, 4, of=4)
        assert await clients[3].status() == 400
    finally:
        for client in clients:
            await client.close()
        assert gateway.stop(signal.SIGTERM) == 0


async def test_all_workers_of_a_machine_reload(cluster: Cluster, bus: Bus) -> None:
    """`pagemill up` runs without a terminal here, and passes the signal on."""
    # Other tests have other gateways at this broker.
    roles = ("coordinator", "engine", "renderer")
    pids = [await cluster.pid(bus, role) for role in roles]

    def num_reloads() -> int:
        return cluster.log.read_text().count('"reloaded"')

    cluster.process.send_signal(signal.SIGHUP)
    await until(lambda: num_reloads() >= len([*roles, "gateway"]))
    assert [await cluster.pid(bus, role) for role in roles] == pids
