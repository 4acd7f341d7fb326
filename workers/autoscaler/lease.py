"""The lead among autoscalers: the plan itself, which only its last writer can replace.

The leader writes its plan once a second, also while it looks. Each write names the sequence of the
one before, so the broker refuses a leader that was overtaken: its decisions never reach an
actuator. Another autoscaler takes the lead when it has seen no write for LEASE_S of its own clock.
"""

import asyncio

from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.errors import Fenced, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import ScalePlan, decode_scale_plan

LEASE_S = 3.0
# The leader writes again when it has not written for so long. Then another 1.5 s are left.
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
        """Each write needs the sequence of the one before."""
        self.plan = ScalePlan("", {})
        """The last plan that was read or written."""
        self.is_held = False

    async def take(self) -> bool:
        """Take the lead if no other autoscaler holds it, and return whether that was done."""
        now_s = asyncio.get_running_loop().time()
        last = await self._bus.read_last(subjects.SCALE_STREAM, subjects.SCALE_PLAN)
        sequence = 0 if last is None else last.sequence
        if sequence != self._sequence or not self._seen_s:
            self._sequence, self._seen_s = sequence, now_s
        if last is not None:
            self.plan = decode_scale_plan(last.data) or ScalePlan("", {})
        # Its own name stands there when it did not learn that its last write was stored.
        free = self.plan.leader in ("", self._worker) or now_s - self._seen_s >= LEASE_S
        if free:
            self.is_held = await self.write(self.plan)
        return self.is_held

    async def write(self, plan: ScalePlan) -> bool:
        """Write a plan; return False if another autoscaler has written since, and leads now."""
        async with self._writing:
            return await self._write(replace(plan, leader=self._worker))

    async def renew(self) -> bool:
        """Write the last plan again unless that was done just now; return False as `write` does."""
        async with self._writing:
            is_due = asyncio.get_running_loop().time() - self._written_s >= RENEW_S
            return not (self.is_held and is_due) or await self._write(self.plan)

    async def release(self) -> bool:
        """Let another autoscaler take the lead at once; return False if the broker does not answer.

        Then the others wait for LEASE_S, and so long it is tried.
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
