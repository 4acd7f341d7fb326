"""A whole Pagemill, started by its own command: broker, coordinator, renderer, engine."""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from openai import AsyncOpenAI

from ops.harness.machine import has_ended
from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat
from shared.protocol.records import LogRecord
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from tests import preloaded
from tests.support.collector import Collector, running_collector
from tests.support.waiting import until

if TYPE_CHECKING:  # Its imports take seconds, which most tests with this file do not need.
    from tests.cluster.processes import Processes

PAGEMILL = [sys.executable, "-m", "workers"]
# The same as a fork, for tests of what a command does and not of its process.
FORKED_PAGEMILL = [*preloaded.PYTHON, "-m", "workers"]
ROOT = Path(__file__).parent.parent.parent
# The only one that images may be fetched from.
IMAGE_HOST = "127.0.0.2"
CONFIG = f"""
models:
  demo:
    path: {ROOT / "ops" / "demo_model"}
    max_model_len: 1024
    sampling_defaults: {{temperature: 0.0, max_tokens: 64}}
delivery: {{ack_wait_s: 2.0, drain_s: 10.0}}
renderer:
  max_image_pixels: 4000000
  media_hosts: [{IMAGE_HOST}]
  media_networks: [127.0.0.0/8]
blobs: {{inline_kib: 1}}  # every image is stored outside the message
"""


@dataclass
class Cluster:
    process: preloaded.ForkedCommand
    url: str
    config: Path
    log: Path
    """The workers' log. The lines of `pagemill up` itself are in `up.err` next to it."""

    @property
    def keys(self) -> Path:
        """The folder of its keys."""
        return self.config.parent / "data" / "nats" / "keys"

    @property
    def client_key(self) -> Path:
        """The key of the tenant that `pagemill up` makes."""
        return self.keys / "tenants" / "local.nk"

    @property
    def http_url(self) -> str:
        """The address of its gateway, from the lines of `pagemill up`."""
        lines = self.log.with_suffix(".err").read_text()
        return lines.partition("ready at ")[2].partition(";")[0].split(" and ")[1].split()[0]

    async def pid(self, bus: Bus, role: str) -> int:
        """Return the process id of the one living worker of a role; wait for its start."""
        async with asyncio.timeout(120):
            while True:
                beats = await living(bus, role)
                if len(beats) == 1:
                    return beats[0].pid
                await asyncio.sleep(0.1)


def reader_env(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Return the environment of a reader's terminal, for clients of a cluster.

    It has the commands `pagemill` and `python`, as in an activated environment of Python. Their
    files are written to the folder.
    """
    for name, command in {"pagemill": FORKED_PAGEMILL, "python": [sys.executable]}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (folder / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NATS_URL": cluster.url,
        "NATS_NKEY": str(cluster.client_key),
        "PAGEMILL_NATS__URL": cluster.url,
        "no_proxy": "*",
        "NO_PROXY": "*",
    }


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """Kill a process, and return when it has closed its files."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # Other threads may end after the first one, and keep the files open until then.
        while not has_ended(pid) or len(os.listdir(f"/proc/{pid}/task")) > 1:
            time.sleep(0.01)


def run(cluster: Cluster, *arguments: str) -> str:
    """Run a command against a cluster, and return what it prints."""
    done = subprocess.run(
        [*FORKED_PAGEMILL, *arguments, "--config", str(cluster.config), "--nats", cluster.url],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_cluster(folder: Path, text: str = CONFIG) -> Cluster:
    config, log = folder / "pagemill.yaml", folder / "up.log"
    err = folder / "up.err"
    config.write_text(text)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"PAGEMILL_NATS__PORT": str(port), "PAGEMILL_GATEWAY__PORT": "0"}
    env["PAGEMILL_LOG_FILE"] = str(log)
    command = ["up", "--config", str(config)]
    with err.open("wb") as stderr:
        process = preloaded.start(command, cwd=folder, env=env, stderr=stderr)
    deadline = time.monotonic() + 150
    while b"ready at" not in err.read_bytes():
        assert process.poll() is None, err.read_text()
        assert time.monotonic() < deadline, err.read_text()
        time.sleep(0.1)
    return Cluster(process, f"nats://127.0.0.1:{port}", config, log)


def stop_cluster(cluster: Cluster) -> int:
    cluster.process.send_signal(signal.SIGINT)
    return cluster.process.wait(30)


@contextlib.contextmanager
def running_cluster(folder: Path, text: str = CONFIG) -> Iterator[Cluster]:
    """Run a cluster that ends with the block, also after a failure."""
    cluster = start_cluster(folder, text)
    try:
        yield cluster
    finally:
        try:
            stop_cluster(cluster)
        finally:
            cluster.process.kill()  # Its children end with it.


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Bus]:
    """Connect to a cluster until the end of the block.

    A connection that is left open is reported much later, as the failure of an unrelated test.
    """
    bus = await Bus.connect(cluster.url, "test")
    try:
        yield bus
    finally:
        await bus.close()


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Collector of the traces of the cluster: only requests with `traceparent` have spans."""
    with running_collector() as running:
        yield running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Cluster]:
    tracing = f"tracing: {{otlp_url: {collector.url}, ratio: 0.0}}\n"
    running = start_cluster(tmp_path_factory.mktemp("cluster"), CONFIG + tracing)
    yield running
    stop_cluster(running)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Bus]:
    async with connected(cluster) as bus:
        yield bus


@pytest.fixture
async def bus(processes: "Processes", request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    """A connection to the broker of a module's processes, when all WORKERS are ready."""
    connected = await Bus.connect(processes.url, "test")
    await until_ready(connected, request.module.WORKERS)
    yield connected
    await connected.close()


async def until_ready(bus: Bus, workers: Iterable[str]) -> None:
    async def are_ready() -> bool:
        with contextlib.suppress(Unavailable):  # until a coordinator has made the stream
            return {b.stage or b.role for b in await bus.heartbeats.read()} >= set(workers)
        return False

    await until(are_ready, 150)


@pytest.fixture
async def url(bus: Bus) -> str:
    return await gateway_url(bus)


@pytest.fixture
async def api(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def gateway_url(bus: Bus) -> str:
    beats = await bus.heartbeats.read()
    return next(beat.url for beat in beats if beat.role == "gateway" and beat.url)


async def answer(bus: Bus, request: GenerateRequest) -> list[LogRecord]:
    return [record async for record in ask(bus, request, new_request_id())]


def request_text(text: str, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        "demo", [Message("user", text)], msgspec.convert(sampling, SamplingParams)
    )


async def living(bus: Bus, role: str) -> list[Heartbeat]:
    """Return the heartbeats of a role. Heartbeats of dead workers linger for some seconds."""
    beats = await bus.heartbeats.read()
    return [beat for beat in beats if beat.role == role and not has_ended(beat.pid)]


def name_of_process(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def parent_of(pid: int) -> int | None:
    """Return the parent of a process, or None once the process has ended."""
    try:
        # The second field after the name, which is in parentheses.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


async def _wait_for_queues(cluster: Cluster, tenant: str) -> None:
    """Wait until a coordinator has created the queues of a new tenant."""
    bus, queues = await Bus.connect(cluster.url, "test"), subjects.queues_of_tenant(tenant)

    async def exist() -> bool:
        return set(await request_queue.streams_of_tenants(bus)) >= queues.keys()

    await until(exist)
    await bus.close()


async def sign_in(cluster: Cluster, key: Path) -> Client:
    """Connect with a stock client, once the server knows the key and its subjects."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(NatsError):
                nc = await nats.connect(cluster.url, nkeys_seed=str(key), allow_reconnect=False)
                if await nc.request("pm.card.demo", b"", timeout=5):
                    await _wait_for_queues(cluster, key.stem)
                    return nc
