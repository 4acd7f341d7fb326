"""The lead among autoscalers."""

import asyncio

import pytest

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.protocol import subjects
from shared.protocol.messages import PoolPlan, ScalePlan
from shared.state.scale_state import read_plan
from workers.autoscaler.lease import Lease

PLAN = ScalePlan("", {"engine/demo": PoolPlan(2)})


@pytest.fixture(autouse=True)
async def no_plan(bus: Bus) -> None:
    await bus.purge(subjects.SCALE_STREAM, ">")


async def test_one_leads_and_the_other_waits(bus: Bus) -> None:
    first, second = Lease(bus, "first"), Lease(bus, "second")
    assert await first.take()
    assert not await second.take()
    assert await first.write(PLAN)
    assert not await second.take()
    await first.release()
    assert await second.take()
    # It continues with the plan of its predecessor.
    assert second.plan == ScalePlan("second", PLAN.pools)


async def test_a_leader_that_was_overtaken_writes_nothing_any_more(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Lease(bus, "first"), Lease(bus, "second")
    assert await first.take()
    assert not await second.take()
    monkeypatch.setattr("workers.autoscaler.lease.LEASE_S", 0.0)
    assert await second.take()
    assert not await first.write(PLAN)
    assert not first.is_held
    plan = await read_plan(bus)
    assert plan is not None
    assert (plan.leader, plan.pools) == ("second", {})


async def test_a_leader_that_writes_is_not_overtaken(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease lasts from the moment when another autoscaler has read the last write."""
    monkeypatch.setattr("workers.autoscaler.lease.LEASE_S", 0.1)
    first, second = Lease(bus, "first"), Lease(bus, "second")
    await first.take()
    assert not await second.take()
    await asyncio.sleep(0.1)
    await first.write(PLAN)
    assert not await second.take()


async def test_a_leader_that_did_not_learn_of_its_own_write_continues(bus: Bus) -> None:
    first, same = Lease(bus, "first"), Lease(bus, "first")
    await first.take()
    assert await same.take()
    assert not await first.write(PLAN)
    assert await first.take()


async def test_a_lead_is_renewed_with_the_same_plan_unless_it_was_written_just_now(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Lease(bus, "first")
    assert await first.take()
    await first.write(PLAN)
    _, before = await bus.figures.sequence_range(subjects.SCALE_STREAM)
    assert await first.renew()
    assert (await bus.figures.sequence_range(subjects.SCALE_STREAM))[1] == before
    monkeypatch.setattr("workers.autoscaler.lease.RENEW_S", 0.0)
    # A write at the same time needs the sequence of the other one.
    written = await asyncio.gather(first.renew(), first.write(PLAN), first.renew())
    assert all(written)
    assert (await bus.figures.sequence_range(subjects.SCALE_STREAM))[1] == before + 3
    assert await read_plan(bus) == ScalePlan("first", PLAN.pools)


async def test_a_lost_lead_is_not_renewed(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.autoscaler.lease.RENEW_S", 0.0)
    first, second = Lease(bus, "first"), Lease(bus, "second")
    await first.take()
    await second.take()
    monkeypatch.setattr("workers.autoscaler.lease.LEASE_S", 0.0)
    assert await second.take()
    assert not await first.renew()
    assert not first.is_held
    plan = await read_plan(bus)
    assert plan is not None
    assert plan.leader == "second"


async def test_the_lead_is_not_released_without_a_broker(
    own_broker: EmbeddedServer, own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.autoscaler.lease.LEASE_S", 0.2)
    lease = Lease(own_bus, "first")
    assert await lease.take()
    own_broker.stop()
    assert not await lease.release()
    assert not lease.is_held
