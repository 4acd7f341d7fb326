"""What several cells are made of: bounds, other commands for workers, questions of their own."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

from ops.chaos.broker_contents import Store
from ops.chaos.history import now
from ops.chaos.matrix.scene import Scene
from ops.chaos.processes import network
from ops.chaos.processes.pool import LOAD, Slot
from shared.errors import Overloaded
from shared.protocol import subjects
from shared.protocol.messages import Failure, GenerateRequest, LogRecord, to_json

WORKER_S = 5.0


BROKER_S = 3.0


# Leader elections took 4.3 to 7.4 s here; the matrix allows 10.
LEADER_S = 10.0


# Three missed pings of two seconds, and one second to come back.
PARTITION_S = 7.0


# A stopped worker of the runs loses its work after an ack wait of 2 s; the broker gives its
# connection up after 15 s.
STOP_S = 18.0


def new_id(name: str) -> str:
    return f"{name}-{now():.3f}".replace(".", "-")


async def lead_in(scene: Scene) -> None:
    """The fault comes when there is something in hand."""
    await asyncio.sleep(scene.rng.uniform(1.0, 2.0))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def request_json(request: GenerateRequest) -> bytes:
    return to_json(request)


async def timed(answer: Awaitable[list[LogRecord]]) -> tuple[list[LogRecord], float]:
    began = now()
    return await answer, now() - began


async def all_of(records: AsyncIterator[LogRecord]) -> list[LogRecord]:
    return [record async for record in records]


@contextlib.contextmanager
def dropping(ports: list[int], **how: object) -> Iterator[None]:
    network.drop(ports, **how)  # type: ignore[arg-type]
    try:
        yield
    finally:
        network.heal()


async def redressed(scene: Scene, slots: list[Slot]) -> None:
    """Have other processes in `slots`, under the commands that they have now."""
    for slot in slots:
        pid = slot.pid
        scene.signal(slot, "replace", signal.SIGKILL)
        await scene.replaced(slot, pid)


def slots_of(scene: Scene, role: str) -> list[Slot]:
    return [slot for slot in scene.pool.slots if slot.role == role]


def one_of_each(scene: Scene) -> list[Slot]:
    """Worker 0 of every role."""
    return [slot for slot in scene.pool.slots if slot.role != LOAD and slot.number == 0]


@contextlib.asynccontextmanager
async def dressed(scene: Scene, slots: list[Slot], *before: str) -> AsyncIterator[None]:
    """The workers in `slots` run under another command; undone at the end."""
    for slot in slots:
        scene.dress(slot, *before)
    await redressed(scene, slots)
    try:
        yield
    finally:
        for slot in slots:
            scene.dress(slot)
        await redressed(scene, slots)


def fill(folder: Path) -> Path:
    """Take all space that is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65_536))
    return ballast


async def until_empty(scene: Scene, timeout_s: float) -> float:
    """Until nothing that cells ask for by themselves is left; seconds."""
    store = await Store.connect(scene.url)
    began = now()
    try:
        while True:
            messages = await store.messages()
            if not messages[subjects.REQUESTS_STREAM] + messages[subjects.STAGES_STREAM]:
                break
            if now() - began > timeout_s:
                scene.note(f"I5: queues are not empty after {timeout_s:.0f} s")
                break
            await asyncio.sleep(0.2)
    finally:
        await store.close()
    return now() - began


def count_answers(scene: Scene, name: str, answers: list[list[LogRecord] | BaseException]) -> None:
    """Finished or refused in words; anything else is a violation."""
    finished = refused = 0
    for answer in answers:
        if isinstance(answer, Overloaded):
            refused += 1
        elif isinstance(answer, BaseException):
            scene.note(f"I10 {name}: {type(answer).__name__}: {answer}")
        elif isinstance(answer[-1], Failure):
            scene.note(f"I10 {name}: ended with {answer[-1].error.code}")
        else:
            finished += 1
    scene.outcome.figures |= {f"{name}_finished": finished, f"{name}_refused": refused}
