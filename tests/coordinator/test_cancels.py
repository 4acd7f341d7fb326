"""Cancelled requests leave their queues before a client sees their end."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog

from shared import client
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.bus.embedded_server import EmbeddedServer
from shared.codec.envelope import TensorData
from shared.config.schema import BlobsConfig, Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.protocol import subjects
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange
from shared.protocol.requests import GenerateRequest, encode_request
from shared.protocol.task_messages import EngineBody, RenderBody, Task
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Ended, Forward, Outcome, WorkerLoop
from shared.state.log_records import is_final
from shared.state.token_log import last_record
from tests.support.waiting import until
from workers import settings
from workers.coordinator import worker as coordinator

MAX_QUEUED = 40
SPEAKING = Path(__file__).parents[2] / "ops" / "demo_voice" / "pagemill.yaml"
QUEUES = subjects.REQUESTS_STREAM, subjects.STAGES_STREAM
DELIVERY = DeliveryConfig(max_queued=MAX_QUEUED)
CONFIG = Config({"demo": ModelConfig("nowhere")}, delivery=DELIVERY)


@dataclass
class Site:
    """A broker with one coordinator, and no other worker at first."""

    bus: Bus
    server: EmbeddedServer
    running: list[asyncio.Task[None]] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)

    def context_of(self, role: str, config: Config = CONFIG) -> Context:
        context = Context(role, f"{role}-1", None, config, self.bus, structlog.get_logger())
        self.contexts.append(context)
        return context

    def coordinate(self, config: Config = CONFIG) -> None:
        main = coordinator.main(self.context_of("coordinator", config))
        self.running.append(asyncio.create_task(main))

    async def publish(self, request: GenerateRequest, number: int) -> list[str]:
        data = encode_request(request)
        names = [f"t-{secrets.token_hex(6)}" for _ in range(number)]
        await asyncio.gather(
            *(self.bus.publish_without_id(subjects.request("demo", name), data) for name in names)
        )
        return names

    async def sizes(self) -> list[int]:
        """Return how many requests and how many tasks are queued."""
        return [(await self.bus.figures.size(stream))[0] for stream in QUEUES]

    async def until_queued(self, num_requests: int, num_tasks: int) -> None:
        async with asyncio.timeout(30):
            while await self.sizes() != [num_requests, num_tasks]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def consume_tasks(self, capacity: int, ack_wait_s: float) -> Consumer:
        """Take tasks as a renderer does."""
        queue = "renderer", "demo", "interactive"
        durable, where = subjects.stage_consumer(*queue), subjects.stage_filter(*queue)
        return await self.bus.queues.consume(
            subjects.STAGES_STREAM, durable, where, capacity, ack_wait_s
        )

    async def cancel(self, names: Sequence[str]) -> None:
        """Cancel requests, and return as soon as each shows its end."""
        await asyncio.gather(*(client.cancel(self.bus, name) for name in names))
        async with asyncio.timeout(30):
            for name in names:
                while not is_final(await last_record(self.bus, name)):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)


@pytest.fixture
async def site(own_broker: EmbeddedServer) -> AsyncIterator[Site]:
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DELIVERY)
    site = Site(bus, own_broker)
    yield site
    for context in site.contexts:
        context.shutdown.signal()
    await asyncio.gather(*site.running)
    await bus.close()


TEXT = GenerateRequest("demo", prompt="a")


async def test_cancelled_requests_leave_their_queues_without_a_stage_worker(site: Site) -> None:
    site.coordinate()
    names = await site.publish(TEXT, MAX_QUEUED)
    await site.until_queued(MAX_QUEUED, MAX_QUEUED)
    await site.cancel(names)
    assert await site.sizes() == [0, 0]
    await site.publish(TEXT, MAX_QUEUED)


async def test_a_cancelled_request_leaves_the_queues_of_all_its_outputs(site: Site) -> None:
    site.coordinate(settings.load_config(SPEAKING))
    spoken = GenerateRequest("demo", given_text="three red circles", outputs=["audio"])
    names = await site.publish(spoken, 3)
    await site.until_queued(3, 3)
    await site.cancel(names)
    assert await site.sizes() == [0, 0]


async def test_a_cancelled_request_leaves_its_queues_while_a_worker_has_its_task(
    site: Site,
) -> None:
    claimed, go_on = asyncio.Event(), asyncio.Event()

    async def hang(_: Task[Any], __: list[TensorData], ___: Job) -> Outcome:
        claimed.set()
        await go_on.wait()
        return Ended()

    site.coordinate()
    renderer = WorkerLoop(site.context_of("renderer"))
    await renderer.add_stage(["demo"], 2, RenderBody, hang)
    site.running.append(asyncio.create_task(renderer.run()))
    names = await site.publish(TEXT, 1)
    await asyncio.wait_for(claimed.wait(), 30)
    await site.cancel(names)
    assert await site.sizes() == [0, 0]
    go_on.set()
    await until(lambda: not renderer.num_claimed)


async def test_a_task_that_is_put_off_leaves_its_queue_with_its_request(site: Site) -> None:
    site.coordinate()
    names = await site.publish(TEXT, 1)
    await site.until_queued(1, 1)
    renderer = await site.consume_tasks(1, ack_wait_s=30.0)
    await (await asyncio.wait_for(renderer.next(), 30)).retry(3600)
    await site.cancel(names)
    assert await site.sizes() == [0, 0]
    depth = await site.bus.figures.depth(subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER)
    assert (depth.num_pending, depth.num_in_flight) == (0, 0)


async def test_a_task_of_a_killed_worker_comes_again_after_another_was_cancelled(
    site: Site,
) -> None:
    site.coordinate()
    await site.publish(TEXT, 3)
    await site.until_queued(3, 3)
    renderer = await site.consume_tasks(3, ack_wait_s=1.0)
    lost, cancelled, done = [await asyncio.wait_for(renderer.next(), 30) for _ in range(3)]
    await site.cancel([subjects.last_token(cancelled.subject)])
    await done.ack()
    for delivery in (lost, cancelled):
        delivery.abandon()
    assert (await asyncio.wait_for(renderer.next(), 30)).subject == lost.subject


async def test_a_request_that_was_cancelled_before_is_removed_when_it_comes(site: Site) -> None:
    name = f"t-{secrets.token_hex(6)}"
    site.coordinate()
    await site.cancel([name])
    await site.bus.publish_without_id(subjects.request("demo", name), encode_request(TEXT))
    await site.until_queued(0, 0)


@pytest.mark.parametrize("is_forwarded_late", [False, True])
async def test_payloads_of_a_cancelled_task_are_released(
    site: Site, is_forwarded_late: bool
) -> None:
    """The renderer stores its task for the engine before, or after the request is cancelled."""
    context = site.context_of("renderer")
    blobs = Blobs(site.bus, "renderer", context.worker, BlobsConfig(arena_mib=1))
    await blobs.start()
    context.stage.blobs = blobs
    rendered, go_on = asyncio.Event(), asyncio.Event()

    async def render(_: Task[Any], __: list[TensorData], job: Job) -> Outcome:
        mm_hash = secrets.token_hex(32)
        blob = blobs.put(mm_hash, [b"pixels"], 60)
        assert blob is not None
        job.outputs.append(blob)
        rendered.set()
        await go_on.wait()
        item = MultiModalKwargsItem("image", mm_hash, PlaceholderRange(0, 1), blob=blob)
        return Forward(EngineBody([1, 2, 3], [item]))

    site.coordinate()
    renderer = WorkerLoop(context)
    await site.bus.watch_subjects(subjects.ENDED_FILTER, context.stage.claims.note_ended)
    await renderer.add_stage(["demo"], 2, RenderBody, render)
    site.running.append(asyncio.create_task(renderer.run()))
    names = await site.publish(TEXT, 1)
    await asyncio.wait_for(rendered.wait(), 30)
    if not is_forwarded_late:
        go_on.set()
        await until(lambda: not renderer.num_claimed)
    assert blobs.num_pinned == 1
    await site.cancel(names)
    if is_forwarded_late:
        await until(lambda: any(job.ended for job in context.stage.claims._jobs.values()))
        go_on.set()
    await until(lambda: not (renderer.num_claimed or blobs.num_pinned))
    assert await site.sizes() == [0, 0]
    await blobs.close()
