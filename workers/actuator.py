"""Interface of an actuator, and the loop that applies the autoscaler's plan to it.

An actuator starts and drains the workers of pools. It publishes reports of its workers and reads
the plan in the bucket `pm_scale`, so it needs no connection to the autoscaler. If several
actuators have the same pool, one of them acts on it.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Protocol

import structlog

from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol import subjects
from shared.protocol.messages import PoolReport, WorkerSlot
from shared.state import scale_state

REPORT_S = 1.0

_log = structlog.get_logger()


class Actuator(Protocol):
    """Starts and drains the workers of pools.

    Methods raise PagemillError while the workers are unknown; no report is published then.
    """

    host: str
    """As in `PoolReport`."""

    def pools(self) -> Sequence[str]:
        """Return the names of the pools that it scales, if their workers are known."""

    def running(self, pool: str) -> list[WorkerSlot]:
        """Return the pool's workers, also those that start or drain."""

    def wanted(
        self, pool: str, count: int, drain: Sequence[int] = (), give_up: Sequence[int] = ()
    ) -> bool:
        """Set the target size, without workers that drain. Return whether any worker changes.

        If there are too many workers, the slots in `drain` are drained first. The slots in
        `give_up` have not become ready, and are drained in any case.
        """


def choose_changes(
    staying: Sequence[int], count: int, drain: Sequence[int], give_up: Sequence[int]
) -> tuple[list[int], int]:
    """Return the slots to drain and the number of workers to start, so that `count` stay.

    `staying` has the slots that do not drain yet. The other parameters are as in
    `Actuator.wanted`.
    """
    victims = [slot for slot in give_up if slot in staying]
    num_extra = len(staying) - len(victims) - count
    more = [slot for slot in drain if slot in staying and slot not in victims]
    return victims + more[: max(0, num_extra)], max(0, -num_extra)


async def follow_plan(bus: Bus, actuator: Actuator) -> None:
    """Make the actuator follow the autoscaler's plan, and publish its reports, until cancelled."""
    follower, woken = _Follower(bus, actuator), asyncio.Event()
    await bus.watch_subjects(subjects.SCALE_PLAN, lambda _: woken.set())
    while True:
        try:
            await follower.follow()
        except PagemillError as error:
            # The broker is away, or no worker has made the bucket yet.
            _log.info("plan_not_read", reason=error.message)
        try:
            async with asyncio.timeout(REPORT_S):
                await woken.wait()
        except TimeoutError:
            pass
        woken.clear()


class _Follower:
    """One actuator, which acts on each pool unless another actuator has reported it lately."""

    def __init__(self, bus: Bus, actuator: Actuator) -> None:
        self._bus = bus
        self._actuator = actuator
        self._name = f"actuator-{secrets.token_hex(4)}"
        self._others: dict[str, str] = {}
        """The other actuator of a pool that was logged last, by pool."""

    async def follow(self) -> None:
        """Report the pools, and change them according to the plan."""
        pools = [pool for pool in self._actuator.pools() if await self._acts_on(pool)]
        for pool in pools:
            await self._report(pool)
        plan = await scale_state.read_plan(self._bus)
        for pool in pools:
            wish = None if plan is None else plan.pools.get(pool)
            if wish is None or wish.actuator != self._name:
                continue
            if self._actuator.wanted(pool, wish.wanted, wish.drain, wish.give_up):
                await self._report(pool)

    async def _acts_on(self, pool: str) -> bool:
        last = await scale_state.read_report(self._bus, pool)
        if last is None or last.actuator == self._name:
            return True
        # This actuator may have acted on the pool before, and reported too late.
        if last.actuator != self._others.get(pool):
            self._others[pool] = last.actuator
            _log.warning("another_actuator", pool=pool, actuator=last.actuator, host=last.host)
        return False

    async def _report(self, pool: str) -> None:
        slots = self._actuator.running(pool)
        report = PoolReport(pool, self._name, self._actuator.host, slots)
        await scale_state.write_report(self._bus, report)
