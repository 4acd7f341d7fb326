"""Cells in which the only nats-server is harmed."""

import asyncio
import os
import signal

from ops.chaos.history import Fault, now
from ops.chaos.matrix.cells.common import (
    BROKER_S,
    PARTITION_S,
    WORKER_S,
    dropping,
    fill,
    lead_in,
    new_id,
    port_of,
    request_json,
    until_empty,
)
from ops.chaos.matrix.cells.memory import starve
from ops.chaos.matrix.scene import Disturb, Scene, Servers
from ops.chaos.processes import network
from shared.errors import Overloaded, PagemillError
from shared.protocol import subjects
from shared.protocol.messages import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams


def _servers(scene: Scene) -> Servers:
    assert isinstance(scene.servers, Servers)
    return scene.servers


async def _broker_back(scene: Scene, old: int) -> None:
    # What is waited for happens in another process.
    while _servers(scene).pid() == old or scene.servers.victim(0) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def broker_killed(times: int, every_s: float) -> Disturb:
    async def disturb(scene: Scene) -> None:
        for turn in range(times):
            await asyncio.sleep(every_s * scene.rng.uniform(0.8, 1.2))
            pid = _servers(scene).pid()
            scene.pool.hurt("kill", "broker", signal.SIGKILL, 0)
            if turn == times - 1:
                await _broker_back(scene, pid)
                await scene.probe("after_broker", BROKER_S)

    return disturb


async def broker_terminated(scene: Scene) -> None:
    await lead_in(scene)
    pid = _servers(scene).pid()
    scene.pool.hurt("drain", "broker", signal.SIGTERM, 0)
    await _broker_back(scene, pid)
    await scene.probe("after_broker", BROKER_S)


def broker_stopped(lasts_s: float) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        pid = _servers(scene).pid()
        with scene.outage("stop"):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(lasts_s)
            finally:
                scene.pool.resume(pid)
        await scene.probe("after_broker", BROKER_S)

    return disturb


async def broker_out_of_memory(scene: Scene) -> None:
    await lead_in(scene)
    pid = _servers(scene).pid()
    scene.journal.write(Fault(now(), "kill", "broker", 0, pid))
    await asyncio.to_thread(starve, pid)
    await _broker_back(scene, pid)
    await scene.probe("after_broker", BROKER_S)


async def broker_lossy(scene: Scene) -> None:
    await lead_in(scene)
    with scene.outage("loss"), dropping([port_of(scene.url)], probability=0.3):
        await asyncio.sleep(6.0)
        scene.outcome.figures["packets_lost"] = network.num_dropped()
    await scene.probe("after_loss", PARTITION_S)


async def disk_full(scene: Scene) -> None:
    """Full for six seconds; then there is space again, and the server is restarted."""
    await lead_in(scene)
    pid = _servers(scene).pid()
    with scene.outage("enospc"):
        ballast = await asyncio.to_thread(fill, _servers(scene).disk)
        refused = await _refusal(scene)
        await asyncio.sleep(6.0)
        await asyncio.to_thread(ballast.unlink)
        scene.pool.hurt("kill", "broker", signal.SIGKILL, 0)
        await _broker_back(scene, pid)
    if refused is not None:
        scene.outcome.figures["refused_after_s"] = refused
    await scene.probe("after_space", BROKER_S)


async def _refusal(scene: Scene) -> float | None:
    """Seconds until a new request is refused; None when the broker took it all the same."""
    began = now()
    request = GenerateRequest("demo", [Message("user", "x" * 200_000)])
    async with scene.bus("refusal") as bus:
        try:
            async with asyncio.timeout(20):
                await bus.publish(
                    subjects.request("demo"), request_json(request), f"full-{began:.0f}"
                )
        except PagemillError as error:
            scene.outcome.figures[f"refused_as_{error.code}"] = 1
            return now() - began
        except TimeoutError:
            scene.note("a publish to a full disk got no answer within 20 s")
    return None


async def queue_at_its_limit(scene: Scene) -> None:
    """REQUESTS at its limit of bytes: refused at once, in words; taken again when there is room."""
    engines = [slot for slot in scene.pool.slots if slot.role == "engine"]
    for slot in engines:
        scene.signal(slot, "stop", signal.SIGSTOP)
    sizes = []
    try:
        async with scene.bus("limit") as bus:
            for number in range(40):
                request = GenerateRequest(
                    "demo", [Message("user", "x" * 200_000)], SamplingParams(max_tokens=1)
                )
                began = now()
                try:
                    await bus.publish(
                        subjects.request("demo"), request_json(request), new_id(f"big-{number}")
                    )
                except Overloaded:
                    sizes.append(now() - began)
    finally:
        for slot in engines:
            scene.pool.resume(slot.pid)
    if not sizes:
        scene.note("I14: 8 MB of requests were taken into a queue of 2 MiB")
    else:
        scene.outcome.figures["refused_after_s"] = max(sizes)
        if max(sizes) > 1.0:
            scene.note(f"I14: refused after {max(sizes):.2f} s")
    await until_empty(scene, 30.0)
    await scene.probe("after_limit", WORKER_S)
