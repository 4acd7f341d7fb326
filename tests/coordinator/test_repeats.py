"""Requests with one id, for one model or for two, before a coordinator has admitted one of them."""

import asyncio

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
from tests.support.waiting import until
from workers.coordinator import worker as coordinator

REQUEST_IDS = [f"r{number}@acme" for number in range(10)]
MAX_TOKENS = 100
# Each request fits once.
LIMIT = DeliveryConfig(tokens_per_minute={"acme": MAX_TOKENS * len(REQUEST_IDS)})
MODELS = ("demo", "other")
CONFIG = Config({model: ModelConfig("nowhere") for model in MODELS}, delivery=LIMIT)


async def start_coordinator(url: str) -> tuple[Bus, asyncio.Task[None]]:
    bus = await Bus.connect(url, "coordinator")
    await bus.streams.prepare(NatsConfig(unchecked=True), LIMIT)
    context = Context("coordinator", "coordinator-1", None, CONFIG, bus, structlog.get_logger())
    return bus, asyncio.create_task(coordinator.main(context))


async def test_of_two_requests_that_are_stored_at_once_one_is_admitted(
    own_broker: EmbeddedServer,
) -> None:
    """The stream refuses the second one for the same model, and a coordinator for another model."""
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), LIMIT)
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    for request_id in REQUEST_IDS:
        for model in (*MODELS, *MODELS):
            request = GenerateRequest(model, prompt="a", sampling_params=sampling)
            subject = subjects.request(model, request_id)
            await bus.publish_without_id(subject, encode_request(request))
    assert (await bus.figures.size(subjects.REQUESTS_STREAM))[0] == 2 * len(REQUEST_IDS)
    connection, running = await start_coordinator(own_broker.url)

    async def are_admitted() -> bool:
        queued = [request.request_id async for request in request_queue.queued_requests(bus)]
        assert {*queued} == {*REQUEST_IDS}
        subjects_of_tasks = await bus.figures.subjects_of(subjects.STAGES_STREAM, "pm.stage.>")
        return queued == REQUEST_IDS and len(subjects_of_tasks) == len(REQUEST_IDS)

    await until(are_admitted)
    tasks = await bus.figures.subjects_of(subjects.STAGES_STREAM, "pm.stage.>")
    assert sorted(subjects.last_token(subject) for subject in tasks) == REQUEST_IDS
    assert [await last_record(bus, request_id) for request_id in REQUEST_IDS] == [None] * 10
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await connection.close()
    await bus.close()
