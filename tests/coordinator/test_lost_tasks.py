"""Requests whose tasks a broker has lost wait until workers have recorded what they have."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.reading import StoredMessage
from shared.config.schema import Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.helpers.task_set import TaskSet
from shared.protocol import subjects
from shared.protocol.records import Failure
from shared.protocol.requests import GenerateRequest, encode_request
from shared.protocol.task_messages import RenderBody
from shared.stage import tasks
from shared.stage.runtime import Context
from shared.state.token_log import last_record
from tests.shared.stage.test_stage import consume, make_stage, next_job
from tests.support.waiting import until
from workers.coordinator import worker as coordinator
from workers.coordinator.worker import REJOIN_S

CONFIG = Config({"demo": ModelConfig("nowhere")})
# Workers connect again and notice a loss within a second.
NOTICED_MS = 1000


@pytest.fixture
async def coordinated(own_bus: Bus) -> AsyncIterator[Bus]:
    log = structlog.get_logger()
    context = Context("coordinator", "coordinator-1", None, CONFIG, own_bus, log)
    running = asyncio.create_task(coordinator.main(context))
    yield own_bus
    context.shutdown.signal()
    await running


async def publish(bus: Bus, name: str, timeout_s: float = 60.0) -> None:
    request = GenerateRequest("demo", prompt="a", timeout_s=timeout_s)
    await bus.publish_without_id(subjects.request("demo", name), encode_request(request))


async def task_of(bus: Bus, name: str) -> StoredMessage:
    task: StoredMessage = await until(
        lambda: bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(name))
    )
    return task


async def test_a_lost_task_is_made_again_when_workers_have_recorded_their_requests(
    coordinated: Bus, own_broker: EmbeddedServer
) -> None:
    await publish(coordinated, "before")
    before, lost = await task_of(coordinated, "before"), coordinated.streams.tasks
    own_broker.stop()
    own_broker.start()
    await until(lambda: coordinated.streams.tasks.created_ms > lost.created_ms)
    await publish(coordinated, "after")
    new, again = [await task_of(coordinated, name) for name in ("after", "before")]
    created_ms = coordinated.streams.tasks.created_ms
    assert new.stored_ms - created_ms < 1000 * REJOIN_S
    assert again.stored_ms - created_ms >= NOTICED_MS
    assert again.msg_id == before.msg_id


async def test_a_task_is_made_again_after_a_worker_that_notices_late_has_recorded_its_request(
    coordinated: Bus, own_broker: EmbeddedServer
) -> None:
    """So another worker leaves the request to this one."""
    bus, background = await Bus.connect(own_broker.url, "renderer"), TaskSet()
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    stage, inbox = make_stage(bus), await consume(bus, "renderer", "demo", ack_wait_s=30.0)
    await publish(coordinated, "kept")
    job = await next_job(stage, inbox)
    task, _ = tasks.decode(job.delivery.data, RenderBody)
    job.identify(task.header, task.body)
    assert await stage.claim(job) is not None

    async def record_late() -> None:
        created_ms = bus.streams.tasks.created_ms
        await until(lambda: bus.now_ms() >= created_ms + 0.7 * NOTICED_MS)
        stage.claims.record_again()

    def on_lost() -> None:
        background.start(record_late())

    bus.queues.on_tasks_lost(on_lost)
    lost = coordinated.streams.tasks
    own_broker.stop()
    own_broker.start()
    await until(lambda: coordinated.streams.tasks.created_ms > lost.created_ms)
    again = await task_of(coordinated, "kept")
    attempts = subjects.ATTEMPTS_STREAM, subjects.attempts("kept")
    (record,) = await until(lambda: coordinated.read(*attempts))
    assert record.stored_ms < again.stored_ms
    await bus.close()


async def test_a_request_with_a_lost_task_ends_at_its_deadline(
    coordinated: Bus, own_broker: EmbeddedServer
) -> None:
    await publish(coordinated, "late", timeout_s=REJOIN_S)
    await task_of(coordinated, "late")
    own_broker.stop()
    own_broker.start()
    failure = await until(lambda: last_record(coordinated, "late"))
    assert isinstance(failure, Failure)
    assert failure.error.code == "deadline_exceeded"
