"""The messages that a short request costs the broker, counted by a client that receives all."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.client import ask
from shared.codec.envelope import TensorData
from shared.config.schema import Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.protocol.records import ChoiceDelta, OutputSummary, Usage
from shared.protocol.requests import GenerateRequest
from shared.protocol.task_messages import EngineBody, RenderBody, Task, TaskBody
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Done, Forward, HandleTask, Outcome, WorkerLoop
from tests.support.waiting import until
from tests.support.workers import Announcement
from workers.coordinator import worker as coordinator

CONFIG = Config({"demo": ModelConfig("nowhere")})
STAGES = {"coordinator": None, "renderer": "renderer", "engine": "engine"}
MESSAGES = {
    "the request": 1,
    "its task for a stage": 2,
    "an attempt of a stage": 2,
    "a record of its log": 2,
    "a record for its reader": 2,
    "a read of TOKENS": 3,
    "a read of STAGES": 1,
    "an answer to a delivery of REQUESTS": 2,
    "an answer to a delivery of STAGES": 2,
}
"""The coordinator reads whether the request is queued twice, and before and after it publishes the
task whether it has ended. The renderer reads that too. The engine, whose first append would be
refused, reads nothing."""


PROBE = "pm.probe"


def name_of(msg: Msg) -> str | None:
    """Return what a message is; None for a message that no request causes."""
    first, *rest = msg.subject.split(".")
    if first == "pm":
        named = {
            "request": "the request",
            "stage": "its task for a stage",
            "attempt": "an attempt of a stage",
            "append": "a record of its log",
            "tokens": "a record for its reader",
        }
        return named.get(rest[0])
    if rest[0] == "ACK":
        return f"an answer to a delivery of {rest[1]}"
    return f"a read of {rest[-1]}" if b"r-" in msg.data else None


async def render(_: Task[Any], __: list[TensorData], job: Job) -> Outcome:
    return Forward(EngineBody([1], []))


async def write(_: Task[Any], __: list[TensorData], job: Job) -> Outcome:
    assert job.log is not None
    await job.log.tokens([ChoiceDelta(0, 0, [1], "a", finish_reason="length")])
    return Done(OutputSummary(Usage(1, 1), 1))


@asynccontextmanager
async def pipeline(url: str) -> AsyncIterator[Bus]:
    """Run a coordinator, and stages that compute nothing. Yield the connection of a client."""
    client, *buses = [await Bus.connect(url, name) for name in ("client", *STAGES)]
    await client.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    first, *stages = [
        Context(role, f"{role}-1", "demo", CONFIG, bus, structlog.get_logger(), stage)
        for bus, (role, stage) in zip(buses, STAGES.items(), strict=True)
    ]
    is_ready = Announcement(first)
    running = [asyncio.create_task(coordinator.main(first))]
    await is_ready.wait()
    handlers: list[tuple[type[TaskBody], HandleTask]] = [(RenderBody, render), (EngineBody, write)]
    for context, (body, handle) in zip(stages, handlers, strict=True):
        loop = WorkerLoop(context)
        await loop.add_stage(["demo"], 4, body, handle)
        running.append(asyncio.create_task(loop.run()))
    try:
        yield client
    finally:
        for context in (first, *stages):
            context.shutdown.signal()
        await asyncio.gather(*running)
        await asyncio.gather(*(bus.close() for bus in (client, *buses)))


async def test_the_messages_of_a_short_request(
    own_broker: EmbeddedServer, nats_client: NatsClient
) -> None:
    counts: Counter[str] = Counter()
    is_subscribed = asyncio.Event()

    async def count(msg: Msg) -> None:
        if msg.subject == PROBE:
            is_subscribed.set()
        if (name := name_of(msg)) is not None:
            counts[name] += 1

    expected = {name: 3 * number for name, number in MESSAGES.items()}
    async with pipeline(own_broker.url) as client:
        for subject in ("pm.>", "$JS.ACK.>", "$JS.API.DIRECT.GET.>"):
            await nats_client.subscribe(subject, cb=count)
        await nats_client.flush()
        # The first message of another connection may miss a subscription that is so new.
        while not is_subscribed.is_set():
            await client.connection.nc.publish(PROBE, b"")
            await asyncio.sleep(0.01)
        for number in range(3):
            request = GenerateRequest("demo", prompt="a")
            assert len([record async for record in ask(client, request, f"r-{number}")]) == 2
        # The last message of each request.
        await until(lambda: counts["an answer to a delivery of STAGES"] >= 6)
        # Each subscription counts in a separate task.
        await until(lambda: counts.total() >= sum(expected.values()))
    assert dict(counts) == expected
