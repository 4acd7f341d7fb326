"""Lease of the leading autoscaler: the plan itself, which only its last writer can replace.

The leader writes its plan once a second, also during a slow reading of the cluster. Each write
names the sequence of the previous one, so the broker refuses the writes of an old leader, and its
decisions never reach an actuator. Another autoscaler takes the lead when it has read no new write
for LEASE_S, by its own clock.
"""

import asyncio

from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.errors import Fenced, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import ScalePlan, decode_scale_plan

LEASE_S = 3.0
# Time between the leader's writes. A late write then has another 1.5 s until the lease ends.
RENEW_S = 1.0


class Lease:
    """One autoscaler's view of the lead."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._bus = bus
        self._worker = worker
        self._sequence = 0
        self._seen_s = 0.0
        self._written_s = 0.0
        self._writing = asyncio.Lock()
        """Held for each write, because a write needs the sequence of the previous one."""
        self.plan = ScalePlan("", {})
        """The last plan that was read or written."""
        self.is_held = False

    async def take(self) -> bool:
        """Take the lead if no other autoscaler has it, and return whether this one leads now."""
        now_s = asyncio.get_running_loop().time()
        last = await self._bus.read_last(subjects.SCALE_STREAM, subjects.SCALE_PLAN)
        sequence = 0 if last is None else last.sequence
        if sequence != self._sequence or not self._seen_s:
            self._sequence, self._seen_s = sequence, now_s
        if last is not None:
            self.plan = decode_scale_plan(last.data) or ScalePlan("", {})
        # The plan names this autoscaler if the acknowledgement of its last write was lost.
        free = self.plan.leader in ("", self._worker) or now_s - self._seen_s >= LEASE_S
        if free:
            self.is_held = await self.write(self.plan)
        return self.is_held

    async def write(self, plan: ScalePlan) -> bool:
        """Write a plan. Return False if another autoscaler has written meanwhile, and leads now."""
        async with self._writing:
            return await self._write(replace(plan, leader=self._worker))

    async def renew(self) -> bool:
        """Write the last plan again unless it is recent. Return False like `write`."""
        async with self._writing:
            is_due = asyncio.get_running_loop().time() - self._written_s >= RENEW_S
            return not (self.is_held and is_due) or await self._write(self.plan)

    async def release(self) -> bool:
        """Release the lead, so that another autoscaler takes it at once.

        It is tried for LEASE_S, after which the lease has ended by itself. Return False if the
        broker has not answered by then.
        """
        if not self.is_held:
            return True
        self.is_held = False
        plan = to_json(replace(self.plan, leader=""))
        try:
            async with asyncio.timeout(LEASE_S):
                await self._bus.append(subjects.SCALE_PLAN, plan, self._sequence)
        except Fenced:
            return True
        except (Unavailable, TimeoutError):
            return False
        return True

    async def _write(self, plan: ScalePlan) -> bool:
        began_s = asyncio.get_running_loop().time()
        try:
            self._sequence = await self._bus.append(
                subjects.SCALE_PLAN, to_json(plan), self._sequence
            )
        except Fenced:
            self.is_held, self._seen_s = False, 0.0
            return False
        self.plan, self._written_s = plan, began_s
        return True
