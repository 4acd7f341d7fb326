"""A Docker engine and a proxy before it, both on Unix sockets."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.config.parsing import parse_config
from tests.docker_proxy.fake_engine import PROJECT, FakeEngine
from workers.autoscaler.docker_api import ProxyApi
from workers.docker_proxy.engine import Engine
from workers.docker_proxy.project import Project
from workers.docker_proxy.server import new_server
from workers.pools import Pools, pools_of

CONFIG = """
models: {a: {path: a, tower: encoder}}
scale: {pools: [{role: engine, max: 3}, {role: encoder, max: 2}]}
"""


def pools() -> Pools:
    return pools_of(parse_config(CONFIG, {}, "test"))


@asynccontextmanager
async def serve_proxy(docker_socket: str, socket: str, project: str) -> AsyncIterator[Project]:
    engine = Engine(docker_socket)
    await engine.open()
    served = Project(engine, project, pools().by_service(), 30)
    server = new_server(served, socket)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.005)
        yield served
    finally:
        server.should_exit = True
        await serving
        for number, handler in handlers.items():
            signal.signal(number, handler)
        await served.close()
        await engine.close()


@pytest.fixture
async def docker(tmp_path: Path) -> AsyncIterator[FakeEngine]:
    made = FakeEngine()
    async with made.serve(tmp_path / "docker.sock"):
        yield made


@pytest.fixture
async def socket(docker: FakeEngine, tmp_path: Path) -> AsyncIterator[str]:
    """The socket of a proxy before the engine."""
    path = str(tmp_path / "proxy.sock")
    async with serve_proxy(str(tmp_path / "docker.sock"), path, PROJECT):
        yield path


@pytest.fixture
async def api(socket: str) -> AsyncIterator[ProxyApi]:
    made = ProxyApi(socket)
    yield made
    await made.close()
