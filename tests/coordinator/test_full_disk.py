"""A coordinator while the broker's disk is nearly full, and a client that publishes requests."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog

from shared.bus.bus import Bus
from shared.config.schema import Config, ModelConfig
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.full_stores import FullStore, FullStores
from shared.protocol.records import Failure
from shared.protocol.requests import GenerateRequest, encode_request
from shared.protocol.steps import GIVEN_TURN, Begun, Ended, PaintTool, painting_id, turn_id
from shared.stage.runtime import Context
from shared.state.step_log import StepLog
from shared.state.token_log import last_record
from tests.support.waiting import until
from workers.coordinator import worker as coordinator

CONFIG = Config({"demo": ModelConfig("nowhere")})
REQUEST = encode_request(GenerateRequest("demo", prompt="a"))
FULL = FullStores([FullStore("n1", 5, 1000)])


@pytest.fixture
async def coordinating(own_bus: Bus) -> AsyncIterator[Context]:
    await own_bus.publish_without_id(subjects.FULL_STORES, to_json(FULL))
    context = Context("coordinator", "c-1", None, CONFIG, own_bus, structlog.get_logger())
    running = asyncio.create_task(coordinator.main(context))
    yield context
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def begin(bus: Bus, tenant: str = "acme") -> StepLog:
    """Begin a response with its first turn and an image."""
    log = StepLog(bus, tenant, "resp_1")
    painter = PaintTool("painter", "image", "90x90", prompt="a circle")
    await log.append(Begun(0, 1, "demo", tenant, [], {}, asks=True, painter=painter))
    return log


@pytest.mark.parametrize("request_id", ["new", "new@acme"])
async def test_a_new_request_ends_with_the_numbers(
    request_id: str, own_bus: Bus, coordinating: Context
) -> None:
    await own_bus.publish_without_id(subjects.request("demo", request_id), REQUEST)
    record = await until(lambda: last_record(own_bus, request_id))
    assert isinstance(record, Failure)
    assert (record.error.code, record.error.retryable) == ("disk_full", True)
    assert "the broker's disk has 5 bytes free, and needs 1000 bytes" in record.error.message
    assert "n1" not in record.error.message

    async def has_no_tasks() -> bool:
        return not await own_bus.figures.subjects_of(subjects.STAGES_STREAM, "pm.stage.>")

    # A coordinator that was late may have published a task, which it removes.
    await until(has_no_tasks)
    (full,) = [s for s in coordinating.metrics.snapshot().series if s.name == "full_stores"]
    assert full.value == 1


@pytest.mark.parametrize(
    "request_id",
    [
        "other~t0@acme",
        turn_id("acme", "resp_1", 1),
        turn_id("evil", "resp_1", 0),
        turn_id("", "resp_1", 0),
        painting_id("acme", "resp_1", GIVEN_TURN, 1),
    ],
)
async def test_a_name_like_a_part_of_a_response_is_not_enough(
    request_id: str, own_bus: Bus, coordinating: Context
) -> None:
    """The response has not asked for this request."""
    await begin(own_bus)
    await own_bus.publish_without_id(subjects.request("demo", request_id), REQUEST)
    record = await until(lambda: last_record(own_bus, request_id))
    assert isinstance(record, Failure)
    assert record.error.code == "disk_full"


async def test_a_part_of_a_response_that_has_ended_is_refused(
    own_bus: Bus, coordinating: Context
) -> None:
    log = await begin(own_bus)
    await log.append(Ended(0, "cancelled", 1))
    request_id = turn_id("acme", "resp_1", 0)
    await own_bus.publish_without_id(subjects.request("demo", request_id), REQUEST)
    record = await until(lambda: last_record(own_bus, request_id))
    assert isinstance(record, Failure)
    assert record.error.code == "disk_full"


@pytest.mark.parametrize(
    "request_id", [turn_id("acme", "resp_1", 0), painting_id("acme", "resp_1", GIVEN_TURN, 0)]
)
async def test_parts_of_a_response_in_flight_are_admitted(
    request_id: str, own_bus: Bus, coordinating: Context
) -> None:
    await begin(own_bus)
    await own_bus.publish_without_id(subjects.request("demo", request_id), REQUEST)

    async def has_task() -> bool:
        subject = subjects.stages_of(request_id)
        return bool(await own_bus.figures.subjects_of(subjects.STAGES_STREAM, subject))

    await until(has_task)
    assert await last_record(own_bus, request_id) is None


async def test_requests_are_admitted_once_there_is_room(
    own_bus: Bus, coordinating: Context
) -> None:
    await own_bus.publish_without_id(subjects.FULL_STORES, to_json(FullStores([])))

    async def is_admitted() -> bool:
        """Publish another request, and return whether one is admitted."""
        await own_bus.publish_without_id(subjects.request("demo", f"r{len(published)}"), REQUEST)
        published.append(True)
        return bool(await own_bus.figures.subjects_of(subjects.STAGES_STREAM, "pm.stage.>"))

    published: list[bool] = []
    await until(is_admitted)
