"""Consumers and streams that are deleted while workers use them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext
from structlog.testing import capture_logs

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.consumer import Puller
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.slot_consumer import SlotQueue
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from tests.support.waiting import until

TASKS = subjects.stage_consumer("renderer", "demo", "batch")
WHERE = subjects.stage_filter("renderer", "demo", "batch")
RESPONSES = subjects.RESPONSES_STREAM, "agents", subjects.RESPONSES_FILTER
REQUESTS = subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER, subjects.REQUESTS_FILTER
CANCELS = subjects.CANCELS_STREAM, subjects.CANCELS_CONSUMER, subjects.CANCELS_FILTER
ANSWER_S = 30.0


@pytest.fixture
async def connect(own_broker: EmbeddedServer) -> AsyncIterator[Callable[..., Any]]:
    opened: list[Bus] = []

    async def connect(*, creates_streams: bool = True) -> Bus:
        bus = await Bus.connect(own_broker.url, "test")
        opened.append(bus)
        bus.streams.creates_streams = creates_streams
        await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
        return bus

    yield connect
    for bus in opened:
        await bus.close()


async def put(bus: Bus, task: str) -> None:
    await bus.publish(subjects.stage("renderer", "demo", "batch", task), task.encode(), task)


async def join(bus: Bus, queue: str) -> Puller:
    match queue:
        case "tasks":
            return await bus.queues.consume(subjects.STAGES_STREAM, TASKS, WHERE, 4, 30.0)
        case "slots":
            slots = [SlotQueue(None, TASKS, WHERE)]
            return await bus.queues.consume_slots(
                subjects.STAGES_STREAM, slots, 4, 30.0, lambda: 0.0
            )
        case "requests":
            return await bus.queues.consume(*REQUESTS, 4, 30.0, feeds_tasks=True)
        case "cancels":
            return await bus.queues.consume(*CANCELS, 4, 30.0)
    return await bus.queues.consume(*RESPONSES, 4, 30.0)


async def fill(bus: Bus, queue: str, name: str) -> None:
    match queue:
        case "tasks" | "slots":
            await put(bus, name)
        case "requests":
            await bus.publish_without_id(subjects.request("demo", name), name.encode())
        case "cancels":
            await bus.publish_without_id(subjects.cancel(name), name.encode())
        case _:
            await bus.publish(subjects.response("demo"), name.encode(), name)


async def until_answered(bus: Bus) -> None:
    await until(lambda: not (bus.queues.outages.is_open or bus.queues._is_stale), ANSWER_S)


@pytest.mark.parametrize("queue", ["tasks", "slots", "requests", "cancels", "responses"])
@pytest.mark.parametrize("deleted", ["consumer", "stream"])
async def test_a_queue_that_is_deleted_comes_back(
    connect: Callable[..., Any], queue: str, deleted: str, jetstream: JetStreamContext
) -> None:
    bus: Bus = await connect()
    puller = await join(bus, queue)
    await fill(bus, queue, "before")
    delivery = await asyncio.wait_for(puller.next(), ANSWER_S)
    await delivery.ack()
    if deleted == "consumer":
        (consumer,) = await jetstream.consumers_info(puller.stream)
        await jetstream.delete_consumer(puller.stream, consumer.name)
    else:
        await jetstream.delete_stream(puller.stream)
        # A coordinator looks after a while, also where no worker notices it.
        bus.queues.check()
    await fill(bus, queue, "after")
    delivery = await asyncio.wait_for(puller.next(), ANSWER_S)
    assert delivery.data == b"after"
    await delivery.ack()
    await until_answered(bus)


async def test_a_worker_that_may_not_create_streams_waits_for_a_coordinator(
    connect: Callable[..., Any],
    jetstream: JetStreamContext,
) -> None:
    coordinator: Bus = await connect()
    bus: Bus = await connect(creates_streams=False)
    consumer = await join(bus, "tasks")
    coordinator.streams.creates_streams = False
    with capture_logs() as logs:
        await jetstream.delete_stream(subjects.STAGES_STREAM)
        await until(lambda: bus.queues.outages.is_open, ANSWER_S)
        await until(
            lambda: bus.queues.outages._refusals[subjects.STAGES_STREAM, TASKS] >= 8, ANSWER_S
        )
        coordinator.streams.creates_streams = True
        coordinator.queues.check()
        await put(coordinator, "after")
        assert (await asyncio.wait_for(consumer.next(), ANSWER_S)).data == b"after"
        await until_answered(bus)
    events = [log["event"] for log in logs]
    assert events.count("queue_refused") == events.count("queues_answer") == 1
    assert "pull_refused" not in events
    assert events.count("streams_restored") == 1


async def test_messages_that_a_new_consumer_delivers_again_are_not_new(
    connect: Callable[..., Any],
) -> None:
    """A coordinator would check their limits a second time, and refuse what is in progress."""
    bus: Bus = await connect()
    consumer = await join(bus, "requests")
    await fill(bus, "requests", "before")
    admitted = await asyncio.wait_for(consumer.next(), ANSWER_S)
    assert admitted.stored_ms >= bus.streams.tasks.since_ms
    await admitted.retry(3600)
    await bus.connection.js.delete_consumer(*REQUESTS[:2])
    again = await asyncio.wait_for(consumer.next(), ANSWER_S)
    assert (again.data, again.attempt) == (b"before", 1)
    assert again.stored_ms < bus.streams.tasks.since_ms
    await until_answered(bus)
    assert again.stored_ms < bus.streams.tasks.since_ms
    await fill(bus, "requests", "after")
    new = await asyncio.wait_for(consumer.next(), ANSWER_S)
    assert new.stored_ms >= bus.streams.tasks.since_ms


async def test_positions_in_a_queue_that_was_deleted_are_not_given_again(
    connect: Callable[..., Any], nats_client: NatsClient
) -> None:
    """A late acknowledgement would settle another request."""
    bus: Bus = await connect()
    consumer = await join(bus, "requests")
    await fill(bus, "requests", "before")
    lost = await asyncio.wait_for(consumer.next(), ANSWER_S)
    await nats_client.jetstream(timeout=ANSWER_S).delete_stream(subjects.REQUESTS_STREAM)
    await fill(bus, "requests", "after")
    new = await asyncio.wait_for(consumer.next(), ANSWER_S)
    assert new.sequence > lost.sequence
    await nats_client.publish(lost.receipt, b"+ACK")
    await bus.delete(subjects.REQUESTS_STREAM, lost.sequence)
    assert await request_queue.queued_request(bus, new.place) is not None
