"""The execution of a schedule of faults, on a pool that records them."""

import asyncio
import itertools
import signal

from ops.chaos.processes import nemesis
from ops.chaos.processes.nemesis import MAX_STARTING, Step


class Recorder:
    """Victims whose processes all become ready when the test says so."""

    def __init__(self, num_starting: int) -> None:
        self.num_starting = num_starting
        self.sent: list[tuple[str, str]] = []
        self.resumed: list[int] = []

    def send_signal(self, kind: str, role: str, number: signal.Signals, pick: int) -> int:
        self.sent.append((kind, role))
        return len(self.sent)

    def resume(self, pid: int) -> None:
        self.resumed.append(pid)


def step(kind: str, role: str = "engine") -> Step:
    return Step(at_s=0.0, kind=kind, role=role, pick=0, lasts_s=60.0)


async def test_faults_wait_until_few_processes_are_starting() -> None:
    victims = Recorder(MAX_STARTING)
    run = asyncio.create_task(nemesis.carry_out([step("kill")], victims))
    await asyncio.sleep(3 * nemesis.WAIT_S)
    assert victims.sent == []
    victims.num_starting = MAX_STARTING - 1
    await run
    assert victims.sent == [("kill", "engine")]


async def test_stopped_processes_are_resumed_at_the_end() -> None:
    victims = Recorder(0)
    run = asyncio.create_task(nemesis.carry_out([step("stop"), step("kill", "broker")], victims))
    await run
    assert victims.sent == [("stop", "engine"), ("kill", "broker")]
    assert victims.resumed == [1]


def test_the_same_seed_makes_the_same_schedule() -> None:
    first, again = (nemesis.make_schedule(7, 2.0, 60.0, nemesis.MIXED) for _ in range(2))
    assert first == again
    assert first != nemesis.make_schedule(8, 2.0, 60.0, nemesis.MIXED)
    assert all(early.at_s < late.at_s < 60.0 for early, late in itertools.pairwise(first))
