"""Cells in which a process of a role is killed, stopped, drained, or runs out of memory."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from ops.chaos.history import Fault, ProcessExited, WorkerEvent, now, read_events
from ops.chaos.matrix.cell import cell, cell_of_each_role
from ops.chaos.matrix.cells.common import STOP_S, WORKER_S, wait_for_load
from ops.chaos.matrix.cells.memory import starve, why_no_memory_limit
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.processes.pool import LOAD, Slot
from ops.chaos.run_config import RANKS_STEP_S
from ops.harness.machine import has_ended


@cell_of_each_role("SIGKILL", "kill -9, three times", "5 s", load_s=8)
async def sigkill(deployment: Deployment, role: str, times: int = 3) -> None:
    for _ in range(times):
        await wait_for_load(deployment)
        slot = deployment.pick(role)
        if not slot.is_alive:
            return
        pid = slot.pid
        deployment.signal(slot, "kill", signal.SIGKILL)
        await served_again(deployment, slot, pid, "after_kill")


async def served_again(
    deployment: Deployment, slot: Slot, pid: int, name: str, within_s: float = WORKER_S
) -> None:
    """Wait until a new request is served and the process has a successor."""
    if slot.role == LOAD:
        await asyncio.sleep(1.0)
        return
    await deployment.probe(name, within_s)
    await deployment.replaced(slot, pid)


@cell("engine: SIGKILL of rank 0", "kill -9", "5 s", on="ranks", rank=0)
@cell("engine: SIGKILL of rank 1", "kill -9", "5 s", on="ranks", rank=1)
@cell("engine: SIGSTOP of rank 1", "kill -STOP", "10 s", on="ranks", rank=1, stops=True)
async def end_rank(deployment: Deployment, rank: int, stops: bool = False) -> None:
    """Kill a rank, or stop it: a step that hangs ends the engine after `step_timeout_s`."""
    number = signal.SIGSTOP if stops else signal.SIGKILL
    await wait_for_load(deployment)
    slot = deployment.pick("engine")
    pid = slot.pid
    (follower,) = children_of(pid)
    if rank == 0:
        deployment.signal(slot, "kill", number)
    else:
        deployment.journal.write(Fault(now(), "kill-rank", slot.role, slot.number, follower))
        slot.expected_exit = True
        os.kill(follower, number)
    within_s = WORKER_S + RANKS_STEP_S if stops else WORKER_S
    await served_again(deployment, slot, pid, "after_kill", within_s)
    if not has_ended(follower):
        deployment.note("engine: rank 1 is alive after rank 0")


def children_of(pid: int) -> list[int]:
    """Return the processes of the other ranks of an engine."""
    return [
        int(child)
        for tasks in Path(f"/proc/{pid}/task").glob("*/children")
        for child in tasks.read_text().split()
        if b"workers.engine.follower" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@cell_of_each_role("SIGSTOP", f"kill -STOP, {STOP_S:.0f} s, kill -CONT", "5 s meanwhile", load_s=22)
@cell(
    "slow: gateway stalls",
    "kill -STOP, 5 s, kill -CONT",
    "5 s meanwhile",
    on="gateways",
    load_s=9,
    role="gateway",
    lasts_s=5.0,
)
async def sigstop(deployment: Deployment, role: str, lasts_s: float = STOP_S) -> None:
    await wait_for_load(deployment)
    slot = deployment.pick(role)
    with deployment.outage("stop-client") if role == LOAD else contextlib.nullcontext():
        deployment.signal(slot, "stop", signal.SIGSTOP)
        pid = slot.pid
        try:
            await deployment.probe("beside_stopped", WORKER_S)
            await asyncio.sleep(lasts_s)
        finally:
            deployment.pool.resume(pid)
    await deployment.probe("after_stop", WORKER_S)


@cell_of_each_role("SIGTERM", "kill -TERM under load", "30 s, exit 0")
async def drain(deployment: Deployment, role: str) -> None:
    await wait_for_load(deployment)
    slot = deployment.pick(role)
    if role == LOAD:
        pid = slot.pid
        deployment.signal(slot, "term", signal.SIGTERM)
        await served_again(deployment, slot, pid, "")
        return
    pid, began = slot.pid, now()
    code = await deployment.pool.restart(slot)
    exits = (
        event
        for event in read_events(deployment.folder / "pool.jsonl")
        if isinstance(event, ProcessExited)
    )
    ended = next(event.t for event in exits if event.pid == pid and event.t > began)
    deployment.outcome.figures["drain_s"] = ended - began
    if code != 0:
        deployment.note(f"{role}: drained with exit code {code}")
    if ended - began > 30.0:
        deployment.note(f"{role}: the drain took {ended - began:.1f} s")
    late = [
        event
        for event in read_events(deployment.folder / "workers" / f"{role}-{pid}.jsonl")
        if isinstance(event, WorkerEvent) and event.step == "received" and event.t > began + 0.2
    ]
    if late:
        deployment.note(f"{role}: received {len(late)} messages more than 0.2 s after SIGTERM")


@cell_of_each_role("rolling restart", "each in turn, twice", "no failure")
async def rolling(deployment: Deployment, role: str, rounds: int = 2) -> None:
    await wait_for_load(deployment)
    for _ in range(rounds):
        for slot in deployment.slots_of(role):
            if role != LOAD:
                await deployment.pool.restart(slot)
            elif slot.is_alive:
                deployment.signal(slot, "term", signal.SIGTERM)
                await asyncio.sleep(1.5)


# A process without memory may write half a line. This removes it before the next start.
_WHOLE_LINES = 'f=$1; shift; [ -n "$(tail -c1 $f 2>/dev/null)" ] && sed -i "$ d" $f; exec "$@"'


@cell_of_each_role(
    "OOM", "memory cgroup, kernel's OOM killer, twice", "5 s", needs=why_no_memory_limit
)
async def out_of_memory(deployment: Deployment, role: str) -> None:
    if role == LOAD:
        deployment.set_command(
            deployment.slot(LOAD), "sh", "-c", _WHOLE_LINES, "sh", str(deployment.clients_file)
        )
    for _ in range(2):
        await wait_for_load(deployment)
        slot = deployment.pick(role)
        if not slot.is_alive:
            return
        pid = slot.pid
        deployment.journal.write(Fault(now(), "oom", role, slot.number, pid))
        await asyncio.to_thread(starve, pid)
        await served_again(deployment, slot, pid, "after_oom")
