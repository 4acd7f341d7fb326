"""Two pools at one broker: each starts its own workers, and follows the plan for them."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.state import scale_state
from tests import preloaded
from tests.cluster.conftest import CONFIG, kill, living
from tests.support.waiting import until
from workers.roles import AUTOSCALER, POOL

SCALED = (
    CONFIG.replace("max_model_len: 1024", "max_model_len: 1024\n    tower: encoder")
    + """
scale:
  pools:
  - {role: engine, min: 1, max: 2, idle_s: 600}
"""
)
ENGINE = "engine/demo"


class Containers:
    """Processes in place of the containers of workers, at one broker."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.running: dict[str, preloaded.ForkedCommand] = {}

    def start(self, name: str, *arguments: str) -> None:
        command = ["worker", *arguments, "--nats", self.url]
        command += ["--config", str(self.folder / "pagemill.yaml")]
        with (self.folder / "workers.log").open("ab") as log:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            self.running[name] = preloaded.start(command, env=env, stderr=log)

    def log(self) -> str:
        return (self.folder / "workers.log").read_text()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    (tmp_path / "pagemill.yaml").write_text(SCALED)
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    host = Containers(tmp_path, server.url)
    try:
        yield host
    finally:
        for process in host.running.values():
            process.terminate()
        for process in host.running.values():
            process.wait(60)
        server.stop()


@pytest.fixture
async def bus(containers: Containers) -> AsyncIterator[Bus]:
    connection = await Bus.connect(containers.url, "test")
    yield connection
    await connection.close()


async def test_each_pool_has_the_workers_of_its_roles(containers: Containers, bus: Bus) -> None:
    async def has(role: str, count: int) -> bool:
        return len(await living(bus, role)) == count

    for name, arguments in {
        "coordinator": ["coordinator"],
        "autoscaler": [AUTOSCALER],
        "engines": [POOL, "--roles", "engine"],
        "encoders": [POOL, "--roles", "encoder"],
    }.items():
        containers.start(name, *arguments)
    await until(lambda: has(POOL, 2))
    # The pool of the plan has its `min`, and the stage without one its `replicas`.
    await until(lambda: has("engine", 1))
    await until(lambda: has("encoder", 1))
    (encoder,) = await living(bus, "encoder")
    report = await scale_state.read_report(bus, ENGINE)
    assert report is not None
    assert report.host == encoder.host

    await _set_size(bus, 2)
    await until(lambda: has("engine", 2))
    plan = await scale_state.read_current_plan(bus)
    assert plan is not None
    assert plan.pools[ENGINE].actuator == report.actuator
    await _set_size(bus, 1)
    await until(lambda: has("engine", 1))

    # A worker that dies is replaced.
    (engine,) = await living(bus, "engine")
    os.kill(engine.pid, 9)

    async def is_replaced() -> bool:
        return engine.pid not in [b.pid for b in await living(bus, "engine")] and await has(
            "engine", 1
        )

    await until(is_replaced)
    containers.running["engines"].terminate()
    assert containers.running["engines"].wait(60) == 0
    assert await has("engine", 0)
    assert [beat.worker for beat in await living(bus, "encoder")] == [encoder.worker]


async def _set_size(bus: Bus, size: int) -> None:
    await scale_state.change_orders(bus, lambda orders: replace(orders, workers={ENGINE: size}))


async def test_workers_of_a_killed_pool_end_with_it(containers: Containers, bus: Bus) -> None:
    containers.start("coordinator", "coordinator")
    containers.start("encoders", POOL, "--roles", "encoder")

    async def has_encoder() -> bool:
        return len(await living(bus, "encoder")) == 1

    await until(has_encoder)
    kill(containers.running["encoders"].pid)

    async def has_ended() -> bool:
        return not await living(bus, "encoder")

    await until(has_ended)
