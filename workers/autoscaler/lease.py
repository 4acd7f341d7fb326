"""The lead among autoscalers: the plan itself, which only its last writer can replace.

The leader writes its plan at least once a second. Each write names the sequence of the one before,
so the broker refuses a leader that was overtaken: its decisions never reach an actuator. Another
autoscaler takes the lead when it has seen no write for LEASE_S of its own clock.
"""

import asyncio

from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import ScalePlan, decode_scale_plan

LEASE_S = 3.0


class Lease:
    """One autoscaler's view of the lead."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._bus = bus
        self._worker = worker
        self._sequence = 0
        self._seen_s = 0.0
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
        plan = replace(plan, leader=self._worker)
        try:
            self._sequence = await self._bus.append(
                subjects.SCALE_PLAN, to_json(plan), self._sequence
            )
        except Fenced:
            self.is_held, self._seen_s = False, 0.0
            return False
        self.plan = plan
        return True

    async def release(self) -> None:
        """Let another autoscaler take the lead at once."""
        if self.is_held:
            self.is_held = False
            plan = to_json(replace(self.plan, leader=""))
            try:
                await self._bus.append(subjects.SCALE_PLAN, plan, self._sequence)
            except Fenced:
                return
