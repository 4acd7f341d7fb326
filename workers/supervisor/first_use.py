"""Workers of `pagemill up` that start when they are needed for the first time."""

import asyncio

from shared.bus.bus import Bus
from shared.protocol import subjects
from workers.roles import AGENT, WorkerSpec
from workers.supervisor.supervisor import Supervisor

# Interval in which the queue is read, in case a notification was lost.
LOOK_S = 60.0


async def start_agent_on_first_use(bus: Bus, supervisor: Supervisor) -> None:
    """Start an agent when the first response is queued, and keep it. Never returns.

    Most clusters get no response, and the process would cost them memory.
    """
    live = await bus.subscribe(subjects.RESPONSES_FILTER)
    spec = WorkerSpec(AGENT)
    while not supervisor.slots(spec):
        size, _ = await bus.figures.size(subjects.RESPONSES_STREAM)
        if size:
            supervisor.add(spec)
        else:
            await live.next(LOOK_S)
    await bus.unsubscribe(live)
    await asyncio.Event().wait()
