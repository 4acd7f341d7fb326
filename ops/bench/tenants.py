"""Measure what tenants with keys cost a broker: memory, start, processor time, requests a second.

For each number of tenants, and for one broker or a cluster of three, two coordinators create and
serve the queues of all tenants. Clients with the keys of up to 16 tenants publish requests that
coordinators end with an error, so that no engine limits the rate.

    python -m ops.bench.tenants [--tenants 1 20] [--replicas 1]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import nats
import uvloop
from nats.aio.client import Client
from nats.errors import Error as NatsError

from ops.chaos.processes.cluster import Cluster
from ops.harness.deployment import demo_tree, deployment
from ops.harness.machine import describe, processor_s
from ops.harness.tables import console
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import NatsConfig
from shared.helpers.task_set import TaskSet
from shared.telemetry import logs
from workers.keyring import Keyring
from workers.roles import WorkerSpec

TENANTS = (1, 20, 200, 500)
REPLICAS = (1, 3)
NUM_COORDINATORS = 2
NUM_CLIENTS = 16
NUM_REQUESTS = 1000
NUM_AT_ONCE = 64
IDLE_S = 10.0
# Coordinators look for new tenants every two seconds.
SETTLE_S = 5.0
# Each queue of a cluster is a Raft group, and 500 tenants have a thousand of them. On two busy
# cores their elections have taken more than five minutes.
START_S = 900.0
COLUMNS = "brokers", "tenants", "MiB", "% idle", "requests/s", "first start s", "restart s"
INVALID = json.dumps({"model": "demo", "messages": []}).encode()


class Figures(NamedTuple):
    ready_s: float
    """From the start of the coordinators until each queue takes requests."""
    memory_mib: float
    """Resident memory of all brokers."""
    idle: float
    """Processors that the brokers use without requests."""
    rate: float
    """Requests a second from publish to end."""
    restart_s: float
    """From the start of the stopped brokers until a tenant's request is stored."""


def _servers(folder: Path, keyring: Keyring, replicas: int) -> list[EmbeddedServer]:
    accounts = keyring.accounts_file
    if replicas == 1:
        return [EmbeddedServer(folder / "n0", accounts_file=accounts)]
    return Cluster(folder, accounts).members


def _pids(servers: list[EmbeddedServer]) -> list[int]:
    return [int(server.pid_file.read_text()) for server in servers]


def _memory_mib(servers: list[EmbeddedServer]) -> float:
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _pids(servers))
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _cpu_s(servers: list[EmbeddedServer]) -> float:
    return sum(processor_s({str(pid): pid for pid in _pids(servers)}).values())


async def _start(servers: list[EmbeddedServer]) -> None:
    await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))


async def _stop(servers: list[EmbeddedServer]) -> None:
    await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))


async def _ignore(error: Exception) -> None:
    """Connections break when the brokers are stopped."""


class Clients:
    """Clients with the keys of some tenants."""

    def __init__(self, connections: list[Client]) -> None:
        self._connections = connections
        self._numbers = itertools.count()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, url: str, keyring: Keyring, names: list[str]
    ) -> AsyncIterator["Clients"]:
        chosen = names[:: max(1, len(names) // NUM_CLIENTS)]
        connections = [
            await nats.connect(
                url.split(","),
                nkeys_seed=str(keyring.file_of_tenant(name)),
                error_cb=_ignore,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,
            )
            for name in chosen
        ]
        yield cls(connections)
        await asyncio.gather(*(connection.close() for connection in connections))

    async def ask(self, connection: Client | None = None) -> None:
        """Publish a request, and wait for its end. Raises NatsError."""
        number = next(self._numbers)
        connection = connection or self._connections[number % len(self._connections)]
        log = await connection.subscribe(f"pm.tokens.r{number}", max_msgs=1)
        reply = await connection.request(f"pm.request.demo.r{number}", INVALID, timeout=10)
        assert "error" not in json.loads(reply.data), reply.data
        await log.next_msg(timeout=60)

    async def wait_until_served(self) -> float:
        """Return the seconds until a request of each client was answered."""
        began_s = time.monotonic()
        for connection in self._connections:
            while True:
                try:
                    await self.ask(connection)
                    break
                except NatsError:
                    assert time.monotonic() < began_s + START_S, "no coordinator answers"
                    await asyncio.sleep(0.1)
        return time.monotonic() - began_s

    async def rate(self) -> float:
        """Return the requests a second with NUM_AT_ONCE in flight."""
        tasks, room = TaskSet(), asyncio.Semaphore(NUM_AT_ONCE)

        async def one() -> None:
            async with room:
                await self.ask()

        began_s = time.monotonic()
        await asyncio.gather(*(tasks.start(one()) for _ in range(NUM_REQUESTS)))
        return NUM_REQUESTS / (time.monotonic() - began_s)


async def measure(num_tenants: int, replicas: int) -> Figures:
    """Run a broker with this number of tenants."""
    with tempfile.TemporaryDirectory(prefix="pagemill-") as name:
        folder = Path(name)
        names = [f"tenant{number}" for number in range(num_tenants)]
        keyring = Keyring(folder / "keys", NatsConfig())
        keyring.complete(names)
        servers = _servers(folder, keyring, replicas)
        await _start(servers)
        url = ",".join(server.url for server in servers)
        settings = {
            "url": url,
            "keys": str(keyring.folder),
            "replicas": replicas,
            # The disk must have room for this many tenants.
            "tenant_request_mib": 1,
        }
        workers = [WorkerSpec("coordinator")] * NUM_COORDINATORS
        # A broker reserves its 10 GB for the queues of tenants and for all other streams.
        small = {"max_token_log_mib": 256, "max_request_mib": 128}
        tree = demo_tree() | {"nats": settings, "delivery": small, "log_level": "error"}
        began_s = time.monotonic()
        try:
            async with (
                deployment(tree, workers=workers, folder=folder),
                Clients.connect(url, keyring, names) as clients,
            ):
                await clients.wait_until_served()
                ready_s = time.monotonic() - began_s
                await asyncio.sleep(SETTLE_S)
                before_s, memory_mib = _cpu_s(servers), _memory_mib(servers)
                await asyncio.sleep(IDLE_S)
                idle = (_cpu_s(servers) - before_s) / IDLE_S
                rate = await clients.rate()
                await _stop(servers)
                began_s = time.monotonic()
                await _start(servers)
                await clients.wait_until_served()
                return Figures(ready_s, memory_mib, idle, rate, time.monotonic() - began_s)
        finally:
            await _stop(servers)


async def main(tenants: list[int], replicas: list[int]) -> None:
    console.print(f"tenants with keys, {describe()}")
    console.print("  ".join(COLUMNS))
    for num_brokers, num_tenants in itertools.product(replicas, tenants):
        figures = await measure(num_tenants, num_brokers)
        row = (
            str(num_brokers),
            str(num_tenants),
            f"{figures.memory_mib:.0f}",
            f"{100 * figures.idle:.1f}",
            f"{figures.rate:.0f}",
            f"{figures.ready_s:.1f}",
            f"{figures.restart_s:.1f}",
        )
        # A run takes minutes, and one that fails must not lose the earlier rows.
        console.print(
            "  ".join(f"{cell:>{len(name)}}" for name, cell in zip(COLUMNS, row, strict=True))
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tenants", type=int, nargs="+", default=TENANTS)
    parser.add_argument("--replicas", type=int, nargs="+", choices=REPLICAS, default=REPLICAS)
    options = parser.parse_args()
    logs.configure_logging("error", role="bench")
    uvloop.run(main(options.tenants, options.replicas))
