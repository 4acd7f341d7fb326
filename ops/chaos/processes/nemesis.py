"""Schedules of faults, drawn from a seed before the run, and their execution.

The same seed makes the same schedule. A fault names a role and a random number. They select one of
the processes that are running at the time.
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
from ops.chaos.processes.cluster import Cluster
from shared.protocol.subjects import REQUESTS_STREAM, STAGES_STREAM, TOKENS_STREAM

# A renderer needs 2 s of a core to start. If renderers died as often as engines do, their starts
# would be most of the machine's load. The clients' process is killed as well.
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
# Stops may exceed the ack wait. Tasks are then redelivered before their first worker resumes.
STOP_S = (1.0, 6.0)
# On a slow machine, faults at a high rate would hit only starting processes, because each start
# takes processor time from the others and from the requests.
MAX_STARTING = 2
WAIT_S = 0.1
# The other members notice the death of a leader only after a while.
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Step:
    """One fault of a schedule."""

    at_s: float
    kind: str
    role: str
    pick: int
    lasts_s: float
    """Duration of a stop."""


def make_schedule(
    seed: int, every_s: float, duration_s: float, weights: dict[str, float]
) -> list[Step]:
    """Draw a schedule; `weights` has the weight of each fault, by names as "kill:engine"."""
    rng = random.Random(f"nemesis:{seed}")
    steps = []
    at_s = every_s
    while at_s < duration_s:
        kind, _, role = rng.choices(list(weights), list(weights.values()))[0].partition(":")
        steps.append(Step(at_s, kind, role, rng.randrange(2**16), rng.uniform(*STOP_S)))
        # Random intervals avoid a common rhythm with timers of the system.
        at_s += every_s * rng.uniform(0.8, 1.2)
    return steps


class Victims(Protocol):
    """The part of a pool that executes faults."""

    @property
    def num_starting(self) -> int: ...

    def send_signal(
        self, kind: str, role: str, number: signal.Signals, pick: int
    ) -> int | None: ...

    def resume(self, pid: int) -> None: ...


async def carry_out(schedule: list[Step], victims: Victims) -> None:
    """Execute a schedule; when cancelled, resume the processes that are stopped.

    While `MAX_STARTING` processes are not ready yet, the rest of the schedule is put off.
    """
    began = now()
    stopped: set[int] = set()
    loop = asyncio.get_running_loop()

    def resume(pid: int) -> None:
        victims.resume(pid)
        stopped.discard(pid)

    try:
        for step in schedule:
            await asyncio.sleep(began + step.at_s - now())
            began += await _wait_for_starts(victims)
            pid = victims.send_signal(step.kind, step.role, SIGNALS[step.kind], step.pick)
            if pid is not None and step.kind == "stop":
                stopped.add(pid)
                loop.call_later(step.lasts_s, resume, pid)
    finally:
        for pid in stopped:
            victims.resume(pid)


async def _wait_for_starts(victims: Victims) -> float:
    """Wait until fewer than `MAX_STARTING` processes are starting; return the seconds waited."""
    due = now()
    while True:
        if victims.num_starting < MAX_STARTING:
            return now() - due
        await asyncio.sleep(WAIT_S)


async def kill_leaders(every_s: float, cluster: Cluster, journal: Journal) -> None:
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
