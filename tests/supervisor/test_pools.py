"""The actuator of a supervisor, over processes that do nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import PoolPlan, PoolReport, ScalePlan
from shared.state import scale_state
from tests.autoscaler.conftest import ENCODER, ENGINE, two_pools
from tests.support.waiting import until
from workers import actuator
from workers.actuator import follow_plan
from workers.roles import WorkerSpec
from workers.supervisor.pool import SupervisedPools
from workers.supervisor.supervisor import Process, Supervisor


async def sleep(worker: WorkerSpec) -> Process:
    """Start a process that waits for a signal."""
    return await asyncio.create_subprocess_exec("sleep", "60")


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    workers = Supervisor(sleep, 5.0, lambda worker, code: None)
    yield workers
    await workers.stop()


def pools_over(supervisor: Supervisor) -> SupervisedPools:
    return SupervisedPools(supervisor, two_pools().by_name.values())


def living(supervisor: Supervisor) -> list[int]:
    spec = WorkerSpec("engine", "demo")
    return [slot.slot for slot in supervisor.slots(spec) if slot.pid and not slot.draining]


async def until_living(supervisor: Supervisor, *slots: int) -> None:
    await until(lambda: living(supervisor) == list(slots))


async def until_ended(supervisor: Supervisor, slot: int) -> None:
    spec = WorkerSpec("engine", "demo")
    await until(lambda: slot not in {worker.slot for worker in supervisor.slots(spec)})


async def next_report(bus: Bus, num_engines: int) -> PoolReport:
    deadline = time.monotonic() + 30.0
    while True:
        report = await scale_state.read_report(bus, ENGINE)
        if report is not None and len(report.slots) == num_engines:
            return report
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_pool_grows_and_its_victims_are_drained_and_not_replaced(
    supervisor: Supervisor,
) -> None:
    pools = pools_over(supervisor)
    assert pools.wanted(ENGINE, 3)
    assert not pools.wanted(ENGINE, 3)
    await until_living(supervisor, 0, 1, 2)
    assert pools.wanted(ENGINE, 2, drain=[1])
    await until_living(supervisor, 0, 2)
    await until_ended(supervisor, 1)
    # The plan still says so when that has been done.
    assert not pools.wanted(ENGINE, 2, drain=[1])


async def test_no_more_are_drained_than_there_are_too_many(supervisor: Supervisor) -> None:
    pools = pools_over(supervisor)
    pools.wanted(ENGINE, 2)
    await until_living(supervisor, 0, 1)
    # A plan that was made before another one was carried out.
    assert pools.wanted(ENGINE, 1, drain=[0, 1])
    await until_living(supervisor, 1)
    assert not pools.wanted(ENGINE, 0)


async def test_a_start_that_is_given_up_is_replaced_when_the_plan_wants_it(
    supervisor: Supervisor,
) -> None:
    pools = pools_over(supervisor)
    pools.wanted(ENGINE, 1)
    await until_living(supervisor, 0)
    assert pools.wanted(ENGINE, 1, give_up=[0])
    await until_living(supervisor, 1)


async def test_a_worker_that_ends_by_itself_is_replaced_under_its_slot(
    supervisor: Supervisor,
) -> None:
    pools = pools_over(supervisor)
    pools.wanted(ENGINE, 1)
    await until_living(supervisor, 0)
    first = supervisor.pids("engine")
    supervisor.processes[0].kill()
    await until(lambda: supervisor.pids("engine") not in ([], first))
    assert living(supervisor) == [0]


async def test_an_actuator_obeys_plans_that_name_it_and_reports_what_it_has(
    bus: Bus, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.purge(subjects.SCALE_STREAM, ">")
    monkeypatch.setattr(actuator, "REPORT_S", 0.05)
    plan = ScalePlan("leader", {ENGINE: PoolPlan(2, actuator="another")})
    await bus.publish_without_id(subjects.SCALE_PLAN, to_json(plan))
    following = asyncio.create_task(follow_plan(bus, pools_over(supervisor)))
    try:
        report = await next_report(bus, 0)
        # The plan was made for workers of an earlier actuator, which ended with it.
        await asyncio.sleep(0.2)
        assert living(supervisor) == []
        mine = ScalePlan("leader", {ENGINE: PoolPlan(2, actuator=report.actuator)})
        await bus.publish_without_id(subjects.SCALE_PLAN, to_json(mine))
        await until_living(supervisor, 0, 1)
        await next_report(bus, 2)
        # A second one on the same broker leaves the pools alone.
        second = asyncio.create_task(follow_plan(bus, pools_over(supervisor)))
        await asyncio.sleep(0.2)
        second.cancel()
        assert (await next_report(bus, 2)).actuator == report.actuator
        # One that was silent for too long leaves the pools to the one that has reported since.
        other = PoolReport(ENGINE, "another", "", [])
        three = ScalePlan("leader", {ENGINE: PoolPlan(3, actuator=report.actuator)})
        for number in range(40):
            await scale_state.write_report(bus, other)
            if number > 20:  # It has seen the other's report by now.
                await bus.publish_without_id(subjects.SCALE_PLAN, to_json(three))
            await asyncio.sleep(0.02)
        assert living(supervisor) == [0, 1]
        assert await scale_state.read_report(bus, ENGINE) == other
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def test_an_actuator_steps_aside_for_one_pool_alone(
    bus: Bus, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.purge(subjects.SCALE_STREAM, ">")
    monkeypatch.setattr(actuator, "REPORT_S", 0.05)
    other = PoolReport(ENGINE, "another", "there", [])
    await scale_state.write_report(bus, other)
    following = asyncio.create_task(follow_plan(bus, pools_over(supervisor)))
    try:
        own = await until(partial(scale_state.read_report, bus, ENCODER))
        assert await scale_state.read_report(bus, ENGINE) == other
        plan = {pool: PoolPlan(1, actuator=own.actuator) for pool in (ENGINE, ENCODER)}
        await bus.publish_without_id(subjects.SCALE_PLAN, to_json(ScalePlan("leader", plan)))
        await until(lambda: len(supervisor.slots(WorkerSpec("encoder", "demo"))) == 1)
        assert living(supervisor) == []
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
