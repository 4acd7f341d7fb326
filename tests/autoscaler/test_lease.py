"""The lead among autoscalers."""

import pytest

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.messages import PoolPlan, ScalePlan
from shared.state.scale_state import read_plan
from workers.autoscaler.lease import Lease

# By the clock of an event loop, of a machine that has run for some seconds.
LONG_AGO_S = 1.0
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
    # It goes on with the plan of its predecessor.
    assert second.plan == ScalePlan("second", PLAN.pools)


async def test_a_leader_that_was_overtaken_writes_nothing_any_more(bus: Bus) -> None:
    first, second = Lease(bus, "first"), Lease(bus, "second")
    assert await first.take()
    assert not await second.take()
    second._seen_s = LONG_AGO_S
    assert await second.take()
    assert not await first.write(PLAN)
    assert not first.is_held
    plan = await read_plan(bus)
    assert plan is not None
    assert (plan.leader, plan.pools) == ("second", {})


async def test_a_leader_that_writes_is_not_overtaken(bus: Bus) -> None:
    """The time since the last write counts, from the moment when it was seen."""
    first, second = Lease(bus, "first"), Lease(bus, "second")
    await first.take()
    assert not await second.take()
    await first.write(PLAN)
    second._seen_s = LONG_AGO_S
    assert not await second.take()


async def test_a_leader_that_did_not_learn_of_its_own_write_goes_on(bus: Bus) -> None:
    first = Lease(bus, "first")
    await first.take()
    lost = first._sequence
    await first.write(PLAN)
    first._sequence = lost
    assert not await first.write(PLAN)
    assert await first.take()
