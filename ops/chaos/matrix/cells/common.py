"""Building blocks of cells: bounds, other commands for workers, additional requests."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

from ops.chaos.broker_contents import Store
from ops.chaos.history import now
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.processes.pool import LOAD, Slot
from shared.errors import Overloaded
from shared.protocol import subjects
from shared.protocol.records import Failure, LogRecord

WORKER_S = 5.0
BROKER_S = 3.0
# Leader elections took 4.3 to 7.4 s here; the matrix allows 10.
LEADER_S = 10.0
# Three missed pings of two seconds, and one second to reconnect.
PARTITION_S = 7.0
# The tasks of a stopped worker are redelivered after an ack wait of 2 s; the broker closes its
# connection after 15 s.
STOP_S = 18.0


def new_id(name: str) -> str:
    return f"{name}-{now():.3f}".replace(".", "-")


async def wait_for_load(deployment: Deployment) -> None:
    """Wait until requests are in flight."""
    await asyncio.sleep(deployment.rng.uniform(1.0, 2.0))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def timed(answer: Awaitable[list[LogRecord]]) -> tuple[list[LogRecord], float]:
    began = now()
    return await answer, now() - began


@contextlib.contextmanager
def stopped(deployment: Deployment, role: str) -> Iterator[None]:
    """Stop all workers of a role."""
    slots = deployment.slots_of(role)
    pids = [slot.pid for slot in slots]
    for slot in slots:
        deployment.signal(slot, "stop", signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            deployment.pool.resume(pid)


async def replace_processes(deployment: Deployment, slots: list[Slot]) -> None:
    """Replace the processes in `slots` by new ones, which run their present commands."""
    for slot in slots:
        pid = slot.pid
        deployment.signal(slot, "replace", signal.SIGKILL)
        await deployment.replaced(slot, pid)


def one_of_each(deployment: Deployment) -> list[Slot]:
    """Return worker 0 of each role."""
    return [slot for slot in deployment.pool.slots if slot.role != LOAD and slot.number == 0]


@contextlib.asynccontextmanager
async def altered(deployment: Deployment, slots: list[Slot], *before: str) -> AsyncIterator[None]:
    """Run the workers in `slots` under a command prefix, and under their own command afterwards."""
    for slot in slots:
        deployment.set_command(slot, *before)
    await replace_processes(deployment, slots)
    try:
        yield
    finally:
        for slot in slots:
            deployment.set_command(slot)
        await replace_processes(deployment, slots)


def fill(folder: Path) -> Path:
    """Fill a disk with one file; return its path."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65_536))
    return ballast


async def until_empty(deployment: Deployment, timeout_s: float) -> float:
    """Wait until the queues are empty; return the seconds that this took."""
    store = await Store.connect(deployment.url)
    began = now()
    try:
        while True:
            messages = await store.messages()
            if not messages[subjects.REQUESTS_STREAM] + messages[subjects.STAGES_STREAM]:
                break
            if now() - began > timeout_s:
                deployment.note(f"I5: queues are not empty after {timeout_s:.0f} s")
                break
            await asyncio.sleep(0.2)
    finally:
        await store.close()
    return now() - began


def count_answers(
    deployment: Deployment, name: str, answers: list[list[LogRecord] | BaseException]
) -> None:
    """Count answers that are finished or refused as overloaded; others are violations."""
    finished = refused = 0
    for answer in answers:
        if isinstance(answer, Overloaded):
            refused += 1
        elif isinstance(answer, BaseException):
            deployment.note(f"I10 {name}: {type(answer).__name__}: {answer}")
        elif isinstance(answer[-1], Failure):
            deployment.note(f"I10 {name}: ended with {answer[-1].error.code}")
        else:
            finished += 1
    deployment.outcome.figures |= {f"{name}_finished": finished, f"{name}_refused": refused}
