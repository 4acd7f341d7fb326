"""The interface of an actuator, and the loop that makes one follow the autoscaler's plan.

An actuator starts and drains the workers of pools. It reports what it has, and reads what it is to
have; both lie in the bucket `pm_scale`, so it needs no connection to the autoscaler.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Protocol

import structlog

from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol import subjects
from shared.protocol.messages import ActuatorReport, ScalePlan, WorkerSlot
from shared.state import scale_state

REPORT_S = 1.0

_log = structlog.get_logger()


class Actuator(Protocol):
    """What starts and stops the workers of pools.

    Methods raise PagemillError while it does not know its workers: then it reports nothing.
    """

    host: str
    """As in `ActuatorReport`."""

    def pools(self) -> Sequence[str]:
        """Return the names of the pools that it scales, and whose workers it knows."""

    def running(self, pool: str) -> list[WorkerSlot]:
        """Return the pool's workers, also those that start or drain."""

    def wanted(
        self, pool: str, count: int, drain: Sequence[int] = (), give_up: Sequence[int] = ()
    ) -> bool:
        """Begin to have `count` workers besides those that drain; return whether that changes any.

        Those of `drain` are drained first, and only while there are too many; those of `give_up`
        have not become ready, and are drained in any case.
        """


def choose_changes(
    staying: Sequence[int], count: int, drain: Sequence[int], give_up: Sequence[int]
) -> tuple[list[int], int]:
    """Return the slots to drain and the number of workers to start, so that `count` stay.

    `staying` are the slots that do not drain yet; the others are those of `Actuator.wanted`.
    """
    victims = [slot for slot in give_up if slot in staying]
    num_extra = len(staying) - len(victims) - count
    more = [slot for slot in drain if slot in staying and slot not in victims]
    return victims + more[: max(0, num_extra)], max(0, -num_extra)


async def follow_plan(bus: Bus, actuator: Actuator) -> None:
    """Have the actuator do what the autoscaler's plan says, and report it, until cancelled."""
    name, woken = f"actuator-{secrets.token_hex(4)}", asyncio.Event()
    await bus.watch_subjects(subjects.SCALE_PLAN, lambda _: woken.set())
    told = ""
    while True:
        try:
            # None if none has reported lately.
            last = await scale_state.read_report(bus)
            if last is not None and last.actuator != name:
                # This one may have acted before, and was silent for too long.
                if last.actuator != told:
                    told = last.actuator
                    _log.warning("another_actuator", actuator=told, host=last.host)
            else:
                await _report(bus, name, actuator)
                plan = await scale_state.read_plan(bus)
                if plan is not None and plan.actuator == name and _obey(actuator, plan):
                    await _report(bus, name, actuator)
        except PagemillError as error:
            # The broker is away, or no worker has made the bucket yet.
            _log.info("plan_not_read", reason=error.message)
        try:
            async with asyncio.timeout(REPORT_S):
                await woken.wait()
        except TimeoutError:
            pass
        woken.clear()


def _obey(actuator: Actuator, plan: ScalePlan) -> bool:
    changed = False
    for pool in actuator.pools():
        if (wish := plan.pools.get(pool)) is not None:
            changed |= actuator.wanted(pool, wish.wanted, wish.drain, wish.give_up)
    return changed


async def _report(bus: Bus, name: str, actuator: Actuator) -> None:
    pools = {pool: actuator.running(pool) for pool in actuator.pools()}
    await scale_state.write_report(bus, ActuatorReport(name, actuator.host, pools))
