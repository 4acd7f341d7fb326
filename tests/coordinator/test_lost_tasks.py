"""Requests whose tasks a broker has lost wait until workers have recorded what they have."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.reading import StoredMessage
from shared.config.schema import Config, ModelConfig
from shared.protocol import subjects
from shared.protocol.records import Failure
from shared.protocol.requests import GenerateRequest, encode_request
from shared.stage.runtime import Context
from shared.state.token_log import last_record
from tests.support.waiting import until
from workers.coordinator import worker as coordinator
from workers.coordinator.worker import REJOIN_S

CONFIG = Config({"demo": ModelConfig("nowhere")})


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
    tasks = [await task_of(coordinated, name) for name in ("after", "before")]
    waited_ms = [task.stored_ms - coordinated.streams.tasks.created_ms for task in tasks]
    assert waited_ms[0] < 1000 * REJOIN_S <= waited_ms[1]
    assert tasks[1].msg_id == before.msg_id


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
