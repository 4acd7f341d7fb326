"""The loop of an autoscaler: the lead while a look takes long, and the end without a broker."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.protocol import subjects
from shared.stage.runtime import Context, Shutdown
from shared.telemetry.metrics import Metrics
from tests.autoscaler.conftest import two_pools
from tests.support.waiting import until
from workers.autoscaler.lease import Lease
from workers.autoscaler.worker import Autoscaler


@pytest.fixture(autouse=True)
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.autoscaler.lease.LEASE_S", 0.6)
    monkeypatch.setattr("workers.autoscaler.worker.LEASE_S", 0.6)
    for module in ("lease", "worker"):
        monkeypatch.setattr(f"workers.autoscaler.{module}.RENEW_S", 0.2)


def make_autoscaler(bus: Bus) -> tuple[Autoscaler, Shutdown, Callable[[], bool]]:
    """The last part returns whether the autoscaler leads."""
    shutdown = Shutdown()
    loads: list[Callable[[], dict[str, float]]] = []
    context: Any = SimpleNamespace(
        bus=bus,
        worker="autoscaler-1",
        shutdown=shutdown,
        log=structlog.get_logger(),
        metrics=Metrics("autoscaler", "autoscaler-1"),
        ready=lambda models, load: loads.append(load),
    )
    autoscaler = Autoscaler(cast(Context, context), two_pools())
    return autoscaler, shutdown, lambda: bool(loads) and loads[0]()["leads"] == 1.0


async def test_a_slow_look_does_not_cost_the_lead(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.purge(subjects.SCALE_STREAM, ">")
    scaler, shutdown, leads = make_autoscaler(bus)
    looks, answered = asyncio.Event(), asyncio.Event()

    async def look() -> None:
        looks.set()
        await answered.wait()

    other = Lease(bus, "autoscaler-2")
    serving = asyncio.create_task(scaler.serve())
    await until(leads)
    monkeypatch.setattr(scaler._reader, "look", look)
    await looks.wait()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 1.5
    while loop.time() < until_s:
        assert not await other.take()
        await asyncio.sleep(0.05)
    assert leads()
    answered.set()
    shutdown.begin()
    await serving
    # The renewed lease is released.
    assert await other.take()


async def test_an_autoscaler_without_a_broker_ends_cleanly(
    own_broker: EmbeddedServer, own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bus", "reading"):
        monkeypatch.setattr(f"shared.bus.{module}.BROKER_DEADLINE_S", 1.0)
    scaler, shutdown, leads = make_autoscaler(own_bus)
    with structlog.testing.capture_logs() as lines:
        serving = asyncio.create_task(scaler.serve())
        await until(leads)
        await asyncio.to_thread(own_broker.stop)
        shutdown.begin()
        async with asyncio.timeout(30):
            await serving
    assert [line["event"] for line in lines if line["log_level"] == "warning"][-1:] == [
        "lead_not_released"
    ]
