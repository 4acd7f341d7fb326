"""The actuator for Docker, over a proxy before an engine that has containers and nothing else."""

import asyncio

import pytest

from shared.errors import ConfigError, Unavailable
from shared.protocol.messages import WorkerSlot
from tests.docker_proxy.conftest import pools
from tests.docker_proxy.fake_engine import FakeEngine
from workers.autoscaler.docker_api import ProxyApi
from workers.autoscaler.docker_pools import DockerPools
from workers.autoscaler.remote_pools import MAX_SLOTS


def slots(actuator: DockerPools, pool: str) -> list[tuple[int, bool]]:
    return [(slot.slot % MAX_SLOTS, slot.draining) for slot in actuator.running(pool)]


async def test_workers_are_started_and_the_chosen_ones_drained(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(1)
    docker.add(1, service="encoder", state="exited")
    actuator = DockerPools(api, pools())
    await actuator.read()
    assert actuator.pools() == ["engine/a", "encoder/a"]
    assert actuator.running("engine/a") == [WorkerSlot(1, 1001, addresses=["172.18.0.1"])]
    assert actuator.running("encoder/a") == []
    assert actuator.wanted("engine/a", 3)
    assert actuator.wanted("encoder/a", 1)
    await actuator.read()
    assert slots(actuator, "engine/a") == [(1, False), (2, False), (3, False)]
    assert slots(actuator, "encoder/a") == [(1, False)]
    numbers = {slot.slot for pool in actuator.pools() for slot in actuator.running(pool)}
    assert len(numbers) == 4
    # The plan says so again when that has been done.
    assert not actuator.wanted("engine/a", 3)
    docker.stops.clear()
    assert actuator.wanted("engine/a", 2, drain=[2, 3])
    await actuator.read()
    assert slots(actuator, "engine/a") == [(1, False), (2, True), (3, False)]
    assert not actuator.wanted("engine/a", 2, drain=[2, 3])
    docker.stops.set()
    async with asyncio.timeout(30):
        while slots(actuator, "engine/a") != [(1, False), (3, False)]:
            await actuator.read()


async def test_a_start_that_is_given_up_is_replaced(docker: FakeEngine, api: ProxyApi) -> None:
    docker.add(1)
    docker.stops.clear()
    actuator = DockerPools(api, pools())
    await actuator.read()
    assert actuator.wanted("engine/a", 1, give_up=[1])
    await actuator.read()
    assert slots(actuator, "engine/a") == [(1, True), (2, False)]


async def test_what_the_engine_refuses_is_asked_for_again(
    docker: FakeEngine, api: ProxyApi
) -> None:
    docker.add(1)
    actuator = DockerPools(api, pools())
    await actuator.read()
    docker.refuses = "/create"
    actuator.wanted("engine/a", 2)
    failures = await actuator.read()
    assert "no space left on device" in failures.pop("engine/a").message
    assert not failures
    assert slots(actuator, "engine/a") == [(1, False)]
    # Not by itself: the plan may be another one by now.
    docker.refuses = None
    await actuator.read()
    assert slots(actuator, "engine/a") == [(1, False)]
    assert actuator.wanted("engine/a", 2)
    await actuator.read()
    assert slots(actuator, "engine/a") == [(1, False), (2, False)]


async def test_nothing_is_reported_while_the_proxy_is_away(
    docker: FakeEngine, api: ProxyApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    actuator = DockerPools(api, pools())
    with pytest.raises(Unavailable):
        actuator.running("engine/a")
    await actuator.read()
    monkeypatch.setattr("workers.autoscaler.remote_pools.REPORT_AGE_S", 0.0)
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="the workers of engine/a were not read lately"):
        actuator.running("engine/a")


async def test_a_proxy_with_another_configuration_ends_the_autoscaler(
    docker: FakeEngine, api: ProxyApi
) -> None:
    actuator = DockerPools(api, pools())
    actuator._services["engine/a"] = "engine-a"
    with pytest.raises(
        ConfigError,
        match=r"^pool engine/a: .* no pool of scale\.pools has the service 'engine-a'; there are:",
    ):
        await actuator.check()
