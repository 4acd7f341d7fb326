"""Cells in which the only nats-server fails."""

import asyncio
import os
import signal

from ops.chaos.history import Fault, now
from ops.chaos.matrix.cell import cell
from ops.chaos.matrix.cells.common import (
    BROKER_S,
    PARTITION_S,
    WORKER_S,
    fill,
    new_id,
    port_of,
    stopped,
    until_empty,
    wait_for_load,
)
from ops.chaos.matrix.cells.memory import starve, why_no_memory_limit
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.plan import Mix
from ops.chaos.processes import network
from ops.chaos.processes.brokers import OneBroker
from shared.errors import Overloaded, PagemillError
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams


def _broker(deployment: Deployment) -> OneBroker:
    assert isinstance(deployment.brokers, OneBroker)
    return deployment.brokers


async def _broker_back(deployment: Deployment, old: int) -> None:
    # Another process restarts the server, so asyncio gets no event.
    while _broker(deployment).pid() == old or deployment.brokers.pick_victim() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


@cell("broker: SIGKILL", "kill -9", "3 s", times=1, every_s=1.5)
@cell("broker: killed every 2 s", "kill -9", "3 s", load_s=18, times=8, every_s=2.0)
async def broker_killed(deployment: Deployment, times: int, every_s: float) -> None:
    for turn in range(times):
        await asyncio.sleep(every_s * deployment.rng.uniform(0.8, 1.2))
        pid = _broker(deployment).pid()
        deployment.pool.send_signal("kill", "broker", signal.SIGKILL, 0)
        if turn == times - 1:
            await _broker_back(deployment, pid)
            await deployment.probe("after_broker", BROKER_S)


@cell("broker: SIGTERM", "kill -TERM", "3 s")
async def broker_terminated(deployment: Deployment) -> None:
    await wait_for_load(deployment)
    pid = _broker(deployment).pid()
    deployment.pool.send_signal("drain", "broker", signal.SIGTERM, 0)
    await _broker_back(deployment, pid)
    await deployment.probe("after_broker", BROKER_S)


@cell("broker: SIGSTOP 30 s", "kill -STOP", "3 s", load_s=20)
async def broker_stopped(deployment: Deployment, lasts_s: float = 30.0) -> None:
    await wait_for_load(deployment)
    pid = _broker(deployment).pid()
    with deployment.outage("stop"):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            deployment.pool.resume(pid)
    await deployment.probe("after_broker", BROKER_S)


@cell("broker: OOM", "memory cgroup", "3 s", needs=why_no_memory_limit)
async def broker_out_of_memory(deployment: Deployment) -> None:
    await wait_for_load(deployment)
    pid = _broker(deployment).pid()
    deployment.journal.write(Fault(now(), "kill", "broker", 0, pid))
    await asyncio.to_thread(starve, pid)
    await _broker_back(deployment, pid)
    await deployment.probe("after_broker", BROKER_S)


@cell(
    "broker: packet loss 30 %",
    "iptables on its port",
    "7 s",
    needs=network.why_unavailable,
    load_s=10,
)
async def broker_lossy(deployment: Deployment) -> None:
    await wait_for_load(deployment)
    port = port_of(deployment.url)
    with deployment.outage("loss"), network.dropping([port], probability=0.3):
        await asyncio.sleep(6.0)
        deployment.outcome.figures["packets_lost"] = network.num_dropped()
    await deployment.probe("after_loss", PARTITION_S)


@cell("broker: disk full", "tmpfs of 24 MiB", "3 s", on="disk", load_s=10)
async def disk_full(deployment: Deployment) -> None:
    """Fill the disk for six seconds; then free it and restart the server."""
    await wait_for_load(deployment)
    pid = _broker(deployment).pid()
    with deployment.outage("enospc"):
        ballast = await asyncio.to_thread(fill, _broker(deployment).disk)
        refused = await _refusal(deployment)
        await asyncio.sleep(6.0)
        await asyncio.to_thread(ballast.unlink)
        deployment.pool.send_signal("kill", "broker", signal.SIGKILL, 0)
        await _broker_back(deployment, pid)
    if refused is not None:
        deployment.outcome.figures["refused_after_s"] = refused
    await deployment.probe("after_space", BROKER_S)


async def _refusal(deployment: Deployment) -> float | None:
    """Return the seconds until a new request is refused, or None if the broker stores it."""
    began = now()
    request = GenerateRequest("demo", [Message("user", "x" * 200_000)])
    async with deployment.bus("refusal") as bus:
        try:
            async with asyncio.timeout(20):
                subject = subjects.request("demo", f"full-{began:.0f}")
                await bus.publish_without_id(subject, to_json(request))
        except PagemillError as error:
            deployment.outcome.figures[f"refused_as_{error.code}"] = 1
            return now() - began
        except TimeoutError:
            deployment.note("a publish to a full disk got no answer within 20 s")
    return None


@cell(
    "broker: queue at its limit",
    "8 MB of requests, limit 2 MiB",
    "refused in 1 s",
    on="tight",
    change={"mix": Mix(deadline=0)},
)
async def queue_at_its_limit(deployment: Deployment) -> None:
    """Fill REQUESTS to its limit in bytes. Requests are refused at once, until there is room."""
    refused_s = []
    with stopped(deployment, "engine"):
        async with deployment.bus("limit") as bus:
            for number in range(40):
                request = GenerateRequest(
                    "demo", [Message("user", "x" * 200_000)], SamplingParams(max_tokens=1)
                )
                began = now()
                try:
                    subject = subjects.request("demo", new_id(f"big-{number}"))
                    await bus.publish_without_id(subject, to_json(request))
                except Overloaded:
                    refused_s.append(now() - began)
    if not refused_s:
        deployment.note("I14: 8 MB of requests were accepted into a queue of 2 MiB")
    else:
        deployment.outcome.figures["refused_after_s"] = max(refused_s)
        if max(refused_s) > 1.0:
            deployment.note(f"I14: refused after {max(refused_s):.2f} s")
    await until_empty(deployment, 30.0)
    await deployment.probe("after_limit", WORKER_S)
