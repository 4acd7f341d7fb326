"""Cells in which a process of a role is killed, stopped, drained, or runs out of memory."""

import asyncio
import contextlib
import signal

from ops.chaos.history import Did, Ended, Fault, now, read_events
from ops.chaos.matrix.cells.common import STOP_S, WORKER_S, lead_in
from ops.chaos.matrix.cells.memory import starve
from ops.chaos.matrix.scene import Disturb, Scene
from ops.chaos.processes.pool import LOAD, Slot


def sigkill(role: str, times: int = 3) -> Disturb:
    async def disturb(scene: Scene) -> None:
        for _ in range(times):
            await lead_in(scene)
            slot = scene.pick(role)
            if not slot.alive:
                return
            pid = slot.pid
            scene.signal(slot, "kill", signal.SIGKILL)
            await served_again(scene, slot, pid, "after_kill")

    return disturb


async def served_again(scene: Scene, slot: Slot, pid: int, name: str) -> None:
    """A new request is served, and then the victim's successor is there too."""
    if slot.role == LOAD:
        await asyncio.sleep(1.0)
        return
    await scene.probe(name, WORKER_S)
    await scene.replaced(slot, pid)


def sigstop(role: str, lasts_s: float = STOP_S) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        slot = scene.pick(role)
        with scene.outage("stop-client") if role == LOAD else contextlib.nullcontext():
            scene.signal(slot, "stop", signal.SIGSTOP)
            pid = slot.pid
            try:
                await scene.probe("beside_stopped", WORKER_S)
                await asyncio.sleep(lasts_s)
            finally:
                scene.pool.resume(pid)
        await scene.probe("after_stop", WORKER_S)

    return disturb


def drain(role: str) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        slot = scene.pick(role)
        if role == LOAD:
            pid = slot.pid
            scene.signal(slot, "term", signal.SIGTERM)
            await served_again(scene, slot, pid, "")
            return
        pid, began = slot.pid, now()
        code = await scene.pool.restart(slot)
        ends = (e for e in read_events(scene.folder / "pool.jsonl") if isinstance(e, Ended))
        ended = next(end.t for end in ends if end.pid == pid and end.t > began)
        scene.outcome.figures["drain_s"] = ended - began
        if code != 0:
            scene.note(f"{role}: drained with exit code {code}")
        if ended - began > 30.0:
            scene.note(f"{role}: the drain took {ended - began:.1f} s")
        if late := _taken_after(scene, role, pid, began + 0.2):
            scene.note(f"{role}: took {late} messages more than 0.2 s after SIGTERM")

    return disturb


def _taken_after(scene: Scene, role: str, pid: int, since: float) -> int:
    events = read_events(scene.folder / "workers" / f"{role}-{pid}.jsonl")
    return sum(isinstance(e, Did) and e.what == "received" and e.t > since for e in events)


def rolling(role: str, rounds: int = 2) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        for _ in range(rounds):
            for slot in [slot for slot in scene.pool.slots if slot.role == role]:
                if role != LOAD:
                    await scene.pool.restart(slot)
                elif slot.alive:
                    scene.signal(slot, "term", signal.SIGTERM)
                    await asyncio.sleep(1.5)

    return disturb


# A process that has no memory left may write half a line.
_WHOLE_LINES = 'f=$1; shift; [ -n "$(tail -c1 $f 2>/dev/null)" ] && sed -i "$ d" $f; exec "$@"'


def out_of_memory(role: str) -> Disturb:
    async def disturb(scene: Scene) -> None:
        if role == LOAD:
            scene.dress(scene.slot(LOAD), "sh", "-c", _WHOLE_LINES, "sh", str(scene.clients_file))
        for _ in range(2):
            await lead_in(scene)
            slot = scene.pick(role)
            if not slot.alive:
                return
            pid = slot.pid
            scene.journal.write(Fault(now(), "oom", role, slot.number, pid))
            await asyncio.to_thread(starve, pid)
            await served_again(scene, slot, pid, "after_oom")

    return disturb
