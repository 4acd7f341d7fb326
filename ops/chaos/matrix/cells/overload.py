"""Cells with more work than the system can hold."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

from ops.chaos.history import now
from ops.chaos.matrix.cells.common import (
    WORKER_S,
    collect,
    count_answers,
    request_json,
    until_empty,
    wait_for_load,
)
from ops.chaos.matrix.deployment import Deployment
from ops.token_logs import read_log
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import Failure
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from shared.state.log_records import is_final


async def engine_slower_than_renderer(deployment: Deployment) -> None:
    """Send long prompts while engines are stopped, so that all of them run at once later."""
    engines = [slot for slot in deployment.pool.slots if slot.role == "engine"]
    async with deployment.bus("slow") as bus:
        for slot in engines:
            deployment.signal(slot, "stop", signal.SIGSTOP)
        began = now()
        sampling = SamplingParams(max_tokens=2)
        asked = [
            asyncio.create_task(deployment.ask(bus, f"wait-{began:.0f}-{n}", sampling, "x" * 1900))
            for n in range(40)
        ]
        await asyncio.sleep(4.0)
        for slot in engines:
            deployment.pool.resume(slot.pid)
        answers = await asyncio.gather(*asked, return_exceptions=True)
    count_answers(deployment, "waited", answers)


async def batch_flood(deployment: Deployment) -> None:
    """Send ten times the load in the batch lane, beside the load."""
    await wait_for_load(deployment)
    async with deployment.bus("flood") as bus:
        began = now()
        asked = []
        for number in range(300):
            request = GenerateRequest(
                "demo",
                [Message("user", "flood")],
                SamplingParams(max_tokens=30, seed=number, temperature=1.0),
                lane="batch",
            )
            id = f"flood-{began:.0f}-{number}"
            asked.append(asyncio.create_task(collect(client.ask(bus, request, id))))
            await asyncio.sleep(0.01)
        await deployment.probe("beside_flood", WORKER_S)
        count_answers(deployment, "flood", await asyncio.gather(*asked, return_exceptions=True))


async def only_load(deployment: Deployment) -> None:
    """Add no fault, because the load itself is one."""


async def queued_then_cancelled(deployment: Deployment, count: int = 1000) -> None:
    """Queue 1,000 requests while engines are stopped, cancel all of them, and check their ends."""
    engines = [slot for slot in deployment.pool.slots if slot.role == "engine"]
    for slot in engines:
        deployment.signal(slot, "stop", signal.SIGSTOP)
    began = now()
    ids = [f"queued-{began:.0f}-{number}" for number in range(count)]
    data = request_json(
        GenerateRequest("demo", [Message("user", "x")], SamplingParams(max_tokens=50))
    )
    try:
        async with deployment.bus("cancel") as bus:
            await _in_parallel(lambda id: bus.publish(subjects.request("demo"), data, id), ids)
            deployment.outcome.figures["queued_s"] = now() - began
            began = now()
            await _in_parallel(lambda id: client.cancel(bus, id), ids)
            deployment.outcome.figures["asked_to_cancel_s"] = now() - began
            for slot in engines:
                deployment.pool.resume(slot.pid)
            await until_empty(deployment, 30.0)
            deployment.outcome.figures["all_ended_s"] = now() - began
            codes = await _in_parallel(lambda id: _end_of(bus, id), ids)
    finally:
        for slot in engines:
            deployment.pool.resume(slot.pid)
    for code in set(codes) - {"cancelled", "finish"}:
        deployment.note(f"I1: {codes.count(code)} of {count} cancelled requests ended with {code}")
    deployment.outcome.figures["cancelled"] = codes.count("cancelled")
    await deployment.probe("after_cancelling", WORKER_S)


async def _end_of(bus: Bus, id: str) -> str:
    log = await read_log(bus, id)
    if not log or not is_final(log[-1]):
        return "no end"
    end = log[-1]
    return end.error.code if isinstance(end, Failure) else "finish"


async def _in_parallel(function: Callable[[str], Awaitable[object]], ids: list[str]) -> list[str]:
    limit = asyncio.Semaphore(64)

    async def one(id: str) -> object:
        async with limit:
            return await function(id)

    return [str(found) for found in await asyncio.gather(*(one(id) for id in ids))]


async def no_common_credit(deployment: Deployment) -> None:
    """Check that no consumer bounds what all workers together hold: one could use it up alone."""
    async with deployment.bus("credit") as bus:
        js = bus.connection.js
        for stream in (subjects.REQUESTS_STREAM, subjects.STAGES_STREAM):
            for info in await js.consumers_info(stream):
                if info.config.max_ack_pending != -1:
                    deployment.note(f"{stream}/{info.name} limits the messages in flight")
