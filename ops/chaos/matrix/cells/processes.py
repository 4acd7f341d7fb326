"""Cells in which a process of a role is killed, stopped, drained, or runs out of memory."""

import asyncio
import contextlib
import signal

from ops.chaos.history import Fault, ProcessExited, WorkerEvent, now, read_events
from ops.chaos.matrix.cells.common import STOP_S, WORKER_S, wait_for_load
from ops.chaos.matrix.cells.memory import starve
from ops.chaos.matrix.deployment import Deployment, Disturb
from ops.chaos.processes.pool import LOAD, Slot


def sigkill(role: str, times: int = 3) -> Disturb:
    async def disturb(deployment: Deployment) -> None:
        for _ in range(times):
            await wait_for_load(deployment)
            slot = deployment.pick(role)
            if not slot.is_alive:
                return
            pid = slot.pid
            deployment.signal(slot, "kill", signal.SIGKILL)
            await served_again(deployment, slot, pid, "after_kill")

    return disturb


async def served_again(deployment: Deployment, slot: Slot, pid: int, name: str) -> None:
    """Wait until a new request is served, and until the process has a successor."""
    if slot.role == LOAD:
        await asyncio.sleep(1.0)
        return
    await deployment.probe(name, WORKER_S)
    await deployment.replaced(slot, pid)


def sigstop(role: str, lasts_s: float = STOP_S) -> Disturb:
    async def disturb(deployment: Deployment) -> None:
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

    return disturb


def drain(role: str) -> Disturb:
    async def disturb(deployment: Deployment) -> None:
        await wait_for_load(deployment)
        slot = deployment.pick(role)
        if role == LOAD:
            pid = slot.pid
            deployment.signal(slot, "term", signal.SIGTERM)
            await served_again(deployment, slot, pid, "")
            return
        pid, began = slot.pid, now()
        code = await deployment.pool.restart(slot)
        ends = (
            e for e in read_events(deployment.folder / "pool.jsonl") if isinstance(e, ProcessExited)
        )
        ended = next(end.t for end in ends if end.pid == pid and end.t > began)
        deployment.outcome.figures["drain_s"] = ended - began
        if code != 0:
            deployment.note(f"{role}: drained with exit code {code}")
        if ended - began > 30.0:
            deployment.note(f"{role}: the drain took {ended - began:.1f} s")
        if late := _num_received_after(deployment, role, pid, began + 0.2):
            deployment.note(f"{role}: received {late} messages more than 0.2 s after SIGTERM")

    return disturb


def _num_received_after(deployment: Deployment, role: str, pid: int, since: float) -> int:
    events = read_events(deployment.folder / "workers" / f"{role}-{pid}.jsonl")
    return sum(isinstance(e, WorkerEvent) and e.what == "received" and e.t > since for e in events)


def rolling(role: str, rounds: int = 2) -> Disturb:
    async def disturb(deployment: Deployment) -> None:
        await wait_for_load(deployment)
        for _ in range(rounds):
            for slot in [slot for slot in deployment.pool.slots if slot.role == role]:
                if role != LOAD:
                    await deployment.pool.restart(slot)
                elif slot.is_alive:
                    deployment.signal(slot, "term", signal.SIGTERM)
                    await asyncio.sleep(1.5)

    return disturb


# A process without memory may write half a line, which this removes before the next start.
_WHOLE_LINES = 'f=$1; shift; [ -n "$(tail -c1 $f 2>/dev/null)" ] && sed -i "$ d" $f; exec "$@"'


def out_of_memory(role: str) -> Disturb:
    async def disturb(deployment: Deployment) -> None:
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

    return disturb
