"""Cells with more work than the system can hold."""

import asyncio
from collections.abc import Awaitable, Callable

from ops.chaos.history import now
from ops.chaos.matrix.cell import cell
from ops.chaos.matrix.cells.common import (
    WORKER_S,
    count_answers,
    new_id,
    stopped,
    until_empty,
    wait_for_load,
)
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.plan import Mix
from ops.token_logs import read_log
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.records import Failure
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from shared.state.log_records import is_final


@cell(
    "slow: engine slower than renderer",
    "engines stopped for 4 s, 40 long prompts",
    on="tight",
    change={"mix": Mix(deadline=0)},
)
async def engine_slower_than_renderer(deployment: Deployment) -> None:
    """Send long prompts while engines are stopped, so that all of them run at once later."""
    async with deployment.bus("slow") as bus:
        with stopped(deployment, "engine"):
            sampling = SamplingParams(max_tokens=2)
            requests = [
                asyncio.create_task(
                    deployment.ask(bus, new_id(f"wait-{number}"), sampling, "x" * 1900)
                )
                for number in range(40)
            ]
            await asyncio.sleep(4.0)
        answers = await asyncio.gather(*requests, return_exceptions=True)
    count_answers(deployment, "waited", answers)


@cell("slow: flood in the batch lane", "10x the load, next to it (run before there were tenants)")
async def batch_flood(deployment: Deployment) -> None:
    """Send ten times the load in the batch lane, next to the load."""
    await wait_for_load(deployment)
    async with deployment.bus("flood") as bus:
        requests = []
        for number in range(300):
            sampling = SamplingParams(max_tokens=30, seed=number, temperature=1.0)
            id = new_id(f"flood-{number}")
            answer = deployment.ask(bus, id, sampling, "flood", lane="batch")
            requests.append(asyncio.create_task(answer))
            await asyncio.sleep(0.01)
        await deployment.probe("beside_flood", WORKER_S)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        count_answers(deployment, "flood", answers)


@cell(
    "overload: 10x rate",
    "100 requests a second into a queue of 60",
    "refused in 1 s",
    on="tight",
    change={
        "rate": 100.0,
        "requests": 600,
        "concurrency": 300,
        "max_tokens": (2, 24),
        "mix": Mix(deadline=0),
    },
)
@cell(
    "overload: KV exhausted",
    "136 blocks for 16 sequences",
    on="tight",
    change={"mix": Mix(deadline=0), "rate": 20.0, "requests": 120},
)
async def only_load(deployment: Deployment) -> None:
    """Inject no fault, because the load itself is one."""


@cell("overload: 1,000 queued, then cancelled", "engines stopped meanwhile", "30 s")
async def queued_then_cancelled(deployment: Deployment, count: int = 1000) -> None:
    """Queue 1,000 requests while engines are stopped, cancel all of them, and check their ends."""
    data = to_json(GenerateRequest("demo", [Message("user", "x")], SamplingParams(max_tokens=50)))
    figures = deployment.outcome.figures
    async with deployment.bus("cancel") as bus:
        began = now()
        ids = [f"queued-{began:.0f}-{number}" for number in range(count)]
        with stopped(deployment, "engine"):
            await _in_parallel(
                lambda id: bus.publish_without_id(subjects.request("demo", id), data), ids
            )
            figures["queued_s"] = now() - began
            began = now()
            await _in_parallel(lambda id: client.cancel(bus, id), ids)
            figures["asked_to_cancel_s"] = now() - began
        await until_empty(deployment, 30.0)
        figures["all_ended_s"] = now() - began
        codes = await _in_parallel(lambda id: _end_of(bus, id), ids)
    for code in set(codes) - {"cancelled", "finish"}:
        deployment.note(f"I1: {codes.count(code)} of {count} cancelled requests ended with {code}")
    figures["cancelled"] = codes.count("cancelled")
    await deployment.probe("after_cancelling", WORKER_S)


async def _end_of(bus: Bus, id: str) -> str:
    log = await read_log(bus, id)
    if not log or not is_final(log[-1]):
        return "no end"
    end = log[-1]
    return end.error.code if isinstance(end, Failure) else "finish"


async def _in_parallel(function: Callable[[str], Awaitable[object]], ids: list[str]) -> list[str]:
    limit = asyncio.Semaphore(64)

    async def call(id: str) -> object:
        async with limit:
            return await function(id)

    return [str(result) for result in await asyncio.gather(*(call(id) for id in ids))]


@cell("overload: max_ack_pending", "has none", load_s=1)
async def no_common_credit(deployment: Deployment) -> None:
    """Check that no consumer limits the tasks of all workers together.

    One worker could use up such a limit alone.
    """
    async with deployment.bus("credit") as bus:
        js = bus.connection.js
        for stream in (subjects.REQUESTS_STREAM, subjects.STAGES_STREAM):
            for info in await js.consumers_info(stream):
                if info.config.max_ack_pending != -1:
                    deployment.note(f"{stream}/{info.name} limits the messages in flight")
