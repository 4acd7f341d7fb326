"""Requests that are stored twice before a coordinator has admitted one of them."""

import asyncio

import pytest
import structlog

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import Config, DeliveryConfig, ModelConfig, NatsConfig
from shared.protocol import subjects
from shared.protocol.requests import GenerateRequest, encode_request
from shared.protocol.sampling import SamplingParams
from shared.stage.runtime import Context
from shared.state.token_log import last_record
from workers.coordinator import worker as coordinator

REQUEST_IDS = [f"r{number}" for number in range(10)]
MAX_TOKENS = 100
# Each request fits once.
LIMIT = DeliveryConfig(tokens_per_minute={"acme": MAX_TOKENS * len(REQUEST_IDS)})
CONFIG = Config({"demo": ModelConfig("nowhere")}, delivery=LIMIT)


async def start_coordinator(url: str) -> tuple[Bus, asyncio.Task[None]]:
    bus = await Bus.connect(url, "coordinator")
    await bus.streams.prepare(NatsConfig(unchecked=True), LIMIT)
    context = Context("coordinator", "coordinator-1", None, CONFIG, bus, structlog.get_logger())
    return bus, asyncio.create_task(coordinator.main(context))


@pytest.mark.parametrize("num_coordinators", [1, 2])
async def test_of_two_requests_that_are_stored_at_once_one_is_admitted(
    num_coordinators: int, own_broker: EmbeddedServer
) -> None:
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), LIMIT)
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    request = encode_request(GenerateRequest("demo", prompt="a", sampling_params=sampling))
    for request_id in REQUEST_IDS:
        for _ in range(2):
            await bus.publish(subjects.request("demo"), request, request_id, "acme")
    started = [await start_coordinator(own_broker.url) for _ in range(num_coordinators)]
    async with asyncio.timeout(60):
        while True:
            queued = [queued.msg_id async for queued in request_queue.queued_requests(bus)]
            depth = await bus.figures.depth(subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER)
            if queued == REQUEST_IDS and depth.num_pending == 0:
                break
            assert {*queued} == {*REQUEST_IDS}
            await asyncio.sleep(0.05)
    tasks = await bus.figures.subjects_of(subjects.STAGES_STREAM, "pm.stage.>")
    assert [subjects.last_token(subject) for subject in tasks] == REQUEST_IDS
    assert [await last_record(bus, request_id) for request_id in REQUEST_IDS] == [None] * 10
    for connection, running in started:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await connection.close()
    await bus.close()
