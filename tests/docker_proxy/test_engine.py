"""The client of the Docker engine, with more calls at one time than it has connections."""

import asyncio
from pathlib import Path

import pytest

from tests.docker_proxy.fake_engine import STOP_S, FakeEngine
from workers.docker_proxy import engine as engine_module
from workers.docker_proxy.engine import Engine


async def test_stops_of_many_workers_keep_no_other_call_from_the_engine(
    docker: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "TIMEOUT_S", 5.0)
    engine = Engine(str(tmp_path / "docker.sock"))
    await engine.open()
    docker.stops.clear()
    made = [docker.add(number) for number in range(1, engine_module.MAX_CONNECTIONS + 2)]
    stops = [asyncio.create_task(engine.stop(one["Id"], STOP_S)) for one in made]
    try:
        async with asyncio.timeout(30):
            while len(docker.changes) < len(made):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await engine.inspect(made[0]["Id"]))["State"]["Status"] == "running"
    finally:
        docker.stops.set()
        await asyncio.gather(*stops)
        await engine.close()
    assert set(docker.states().values()) == {"exited"}
