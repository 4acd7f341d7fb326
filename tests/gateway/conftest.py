"""Gateways in front of one Pagemill with the demo model."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from shared.bus.bus import Bus
from tests import preloaded
from tests.cluster.conftest import CONFIG, PAGEMILL, Cluster, start_cluster, stop_cluster

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
# Streams with event ids.
WITH_IDS = {"accept": "text/event-stream"}


Process = preloaded.ForkedCommand | subprocess.Popen[bytes]


@dataclass
class Gateway:
    process: Process
    url: str
    log: Path

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_gateway(cluster: Cluster, folder: Path, port: int = 0, **section: object) -> Gateway:
    """Start another gateway of `cluster`. `section` is its configuration."""
    tree = yaml.safe_load(cluster.config.read_text())
    tree["gateway"] = {"port": port} | section
    return start_gateway_at(cluster.url, tree, folder)


def start_gateway_at(
    url: str, tree: dict[str, Any], folder: Path, *, forked: bool = True
) -> Gateway:
    """Start a gateway at any broker, with a separate configuration.

    Without a fork of the preloader, the gateway has imported only its own modules.
    """
    config, log = folder / "gateway.yaml", folder / "gateway.log"
    config.write_text(yaml.safe_dump(tree))
    command = ["worker", "gateway", "--config", str(config), "--nats", url]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as stderr:
        process: Process = (
            preloaded.start(command, cwd=folder, env=env, stderr=stderr)
            if forked
            else subprocess.Popen(
                [*PAGEMILL, *command], cwd=folder, env=env, stderr=stderr, start_new_session=True
            )
        )
    deadline = time.monotonic() + 30
    while (address := _listening(log, start)) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return Gateway(process, address, log)


def _listening(log: Path, start: int) -> str | None:
    written = log.read_bytes()[start:].decode()
    match = re.search(r'"event": ?"ready"', written) and re.search(r'"url": ?"([^"]+)"', written)
    return match.group(1) if match else None


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("cluster"), CONFIG)
    yield running
    stop_cluster(running)


@pytest.fixture(scope="session")
def gateway(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway without keys, for all tests that do not stop it."""
    running = start_gateway(cluster, tmp_path_factory.mktemp("gateway"), access_log=True)
    yield running
    running.stop()


Start = Callable[..., Gateway]


@pytest.fixture
def another(cluster: Cluster, tmp_path: Path) -> Iterator[Start]:
    """A function that starts gateways with a given configuration. They stop with the test."""
    started: list[Gateway] = []

    def start(port: int = 0, **section: object) -> Gateway:
        started.append(start_gateway(cluster, tmp_path, port, **section))
        return started[-1]

    yield start
    for gateway in started:
        if gateway.process.poll() is None:
            gateway.stop()


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=gateway.url, timeout=60, trust_env=False, headers=WITH_IDS
    ) as client:
        yield client


@pytest.fixture
async def bus(cluster: Cluster) -> AsyncIterator[Bus]:
    """A connection to the broker of the gateway's cluster."""
    connection = await Bus.connect(cluster.url, "test")
    yield connection
    await connection.close()
