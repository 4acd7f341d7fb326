"""Which fault comes when: a schedule drawn from a seed before the run, and then carried out.

Same seed, same schedule. A fault names a role and a random number; which process that is depends on
who is alive at the time.
"""

import asyncio
import contextlib
import itertools
import os
import random
import signal
from dataclasses import dataclass
from typing import Protocol

from ops.chaos.history import Fault, Journal, now
from ops.chaos.processes.cluster import Cluster3
from shared.protocol.subjects import REQUESTS_STREAM, STAGES_STREAM, TOKENS_STREAM

# A renderer takes 3 to 4 s of a core to come back: as often as an engine, renderers would be the
# whole load of the machine. The client process is part of the system too.
KILLS = {
    "kill:engine": 4.0,
    "kill:coordinator": 2.0,
    "kill:renderer": 0.6,
    "kill:broker": 1.0,
    "kill:load": 0.4,
}
MIXED = KILLS | {
    "stop:engine": 1.0,
    "stop:coordinator": 0.5,
    "stop:broker": 0.2,
    "drain:engine": 1.0,
    "drain:coordinator": 0.5,
}

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "drain": signal.SIGTERM,
}
# Longer than the ack wait of a run: what is in hand goes to another, and comes back to life then.
STOP_S = (1.0, 6.0)
# Nobody knows yet of a leader that has just died.
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Step:
    at_s: float
    kind: str
    role: str
    pick: int
    lasts_s: float
    """Of a stop."""


def make_schedule(
    seed: int, every_s: float, duration_s: float, weights: dict[str, float]
) -> list[Step]:
    rng = random.Random(f"nemesis:{seed}")
    steps = []
    at_s = every_s
    while at_s < duration_s:
        kind, _, role = rng.choices(list(weights), list(weights.values()))[0].partition(":")
        steps.append(Step(at_s, kind, role, rng.randrange(2**16), rng.uniform(*STOP_S)))
        # Never in step with anything that the system does once a second.
        at_s += every_s * rng.uniform(0.8, 1.2)
    return steps


class Victims(Protocol):
    """What a nemesis needs of a pool."""

    def hurt(self, kind: str, role: str, number: signal.Signals, pick: int) -> int | None: ...

    def resume(self, pid: int) -> None: ...


async def carry_out(schedule: list[Step], victims: Victims) -> None:
    """Ends when the schedule does; cancelled before that, it continues whom it had stopped."""
    began = now()
    stopped: set[int] = set()
    loop = asyncio.get_running_loop()

    def resume(pid: int) -> None:
        victims.resume(pid)
        stopped.discard(pid)

    try:
        for step in schedule:
            await asyncio.sleep(began + step.at_s - now())
            pid = victims.hurt(step.kind, step.role, SIGNALS[step.kind], step.pick)
            if pid is not None and step.kind == "stop":
                stopped.add(pid)
                loop.call_later(step.lasts_s, resume, pid)
    finally:
        for pid in stopped:
            victims.resume(pid)


async def kill_leaders(every_s: float, cluster: Cluster3, journal: Journal) -> None:
    """Kill the leader of one stream after the other, the next when the last has caught up."""
    for stream in itertools.cycle((TOKENS_STREAM, STAGES_STREAM, REQUESTS_STREAM)):
        began = now()
        leader = await cluster.leader_of(stream)
        if leader is not None:
            journal.write(Fault(now(), "kill", "leader", leader, cluster.pid(leader)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(cluster.pid(leader), signal.SIGKILL)
            await asyncio.sleep(SETTLE_S)
            await cluster.wait_current()
        await asyncio.sleep(began + every_s - now())
