"""The loop of an autoscaler: its lead, its metrics, and faults of the broker."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import PoolPlan, ScalePlan
from shared.stage.runtime import Context, Shutdown
from shared.state.scale_state import read_plan
from shared.telemetry.metrics import Metrics
from tests.autoscaler.conftest import ENCODER, ENGINE, two_pools
from tests.support.waiting import until
from workers.autoscaler.figures import Look, Queue, Reader
from workers.autoscaler.lease import Lease
from workers.autoscaler.presence import Workers
from workers.autoscaler.worker import Autoscaler


@pytest.fixture(autouse=True)
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.autoscaler.lease.LEASE_S", 0.6)
    monkeypatch.setattr("workers.autoscaler.worker.LEASE_S", 0.6)
    for module in ("lease", "worker"):
        monkeypatch.setattr(f"workers.autoscaler.{module}.RENEW_S", 0.2)


def make_autoscaler(
    bus: Bus, metrics: Metrics | None = None
) -> tuple[Autoscaler, Shutdown, Callable[[], bool]]:
    """The last part returns whether the autoscaler leads."""
    shutdown = Shutdown()
    loads: list[Callable[[], dict[str, float]]] = []
    context: Any = SimpleNamespace(
        bus=bus,
        worker="autoscaler-1",
        shutdown=shutdown,
        log=structlog.get_logger(),
        metrics=metrics or Metrics("autoscaler", "autoscaler-1"),
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

    async def look(_: Reader) -> None:
        looks.set()
        await answered.wait()

    monkeypatch.setattr(Reader, "look", look)
    other = Lease(bus, "autoscaler-2")
    serving = asyncio.create_task(scaler.serve())
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


@pytest.mark.parametrize("request_id", ["r", "r@acme"])
async def test_a_request_is_not_forgotten_when_the_broker_fails(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, request_id: str
) -> None:
    """The request comes while its pools are at zero, and the look that it causes fails."""
    await bus.purge(subjects.SCALE_STREAM, ">")
    monkeypatch.setattr("workers.autoscaler.worker.LOOK_S", 600.0)
    roles = [(role, lane) for role in ("engine", "encoder") for lane in subjects.LANES]
    queues = {(role, "demo", lane): Queue(0, 0, 0.0) for role, lane in roles}
    workers, actuators = {ENGINE: Workers(), ENCODER: Workers()}, {ENGINE: "a", ENCODER: "a"}
    num_looks, watches, watch_subjects = 0, asyncio.Event(), bus.watch_subjects

    async def look(_: Reader) -> Look:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            monkeypatch.setattr("workers.autoscaler.worker.LOOK_S", 0.01)
            raise Unavailable("the broker does not answer")
        return Look(queues, workers, actuators)

    async def watch(subject: Any, callback: Callable[[str], None]) -> Any:
        end = await watch_subjects(subject, callback)
        watches.set()
        return end

    async def is_planned() -> bool:
        plan = await read_plan(bus) or ScalePlan("", {})
        return ENGINE in plan.pools and plan.pools[ENGINE].wanted == 1

    monkeypatch.setattr(Reader, "look", look)
    monkeypatch.setattr(bus, "watch_subjects", watch)
    scaler, shutdown, _ = make_autoscaler(bus)
    serving = asyncio.create_task(scaler.serve())
    await watches.wait()
    await bus.publish_without_id(subjects.request("demo", request_id), b"{}")
    await until(is_planned, within_s=30.0, message="the pool stays at zero")
    assert num_looks > 2
    shutdown.begin()
    await serving
    await bus.purge(subjects.REQUESTS_STREAM, ">")


async def test_only_the_leader_reports_the_pools(bus: Bus) -> None:
    """The sum over autoscalers would count workers twice."""
    await bus.purge(subjects.SCALE_STREAM, ">")
    metrics = Metrics("autoscaler", "autoscaler-1")
    scaler, shutdown, leads = make_autoscaler(bus, metrics)

    def num_wanted() -> float:
        series = [s for s in metrics.snapshot().series if s.name == "scale_wanted"]
        return sum(s.value for s in series)

    async def write(leader: str) -> None:
        plan = ScalePlan(leader, {ENGINE: PoolPlan(3)})
        await bus.publish_without_id(subjects.SCALE_PLAN, to_json(plan))

    await write("")
    serving = asyncio.create_task(scaler.serve())
    await until(leads)
    assert num_wanted() == 3.0
    await write("another")
    await until(lambda: not leads())
    assert num_wanted() == 0.0
    shutdown.begin()
    await serving
