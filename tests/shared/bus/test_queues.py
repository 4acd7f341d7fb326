"""Queues are restored when a broker that runs alone has lost its memory."""

import asyncio
import contextlib
import math
import shutil
import time
from pathlib import Path

import pytest
from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext, api

from shared.bus.bus import Bus
from shared.bus.consumer import Consumer
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.slot_consumer import SlotQueue
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import Unavailable
from shared.protocol import subjects
from tests.support.waiting import until

QUEUE = subjects.stage_consumer("renderer", "demo", "batch")
REQUESTS = subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER, subjects.REQUESTS_FILTER
ANSWER_S = 10.0
# The queues on disk of a lone broker, each with three of its subjects.
QUEUES = {
    REQUESTS[0]: (*REQUESTS[1:], [subjects.request("demo", f"{n}@t") for n in "abc"]),
    subjects.CANCELS_STREAM: (
        subjects.CANCELS_CONSUMER,
        subjects.CANCELS_FILTER,
        [subjects.cancel(f"{n}@t") for n in "abc"],
    ),
    subjects.RESPONSES_STREAM: (
        subjects.RESPONSES_CONSUMER,
        subjects.RESPONSES_FILTER,
        [subjects.response(n) for n in "abc"],
    ),
    subjects.BATCHJOBS_STREAM: (
        subjects.BATCHJOBS_CONSUMER,
        subjects.BATCHJOBS_FILTER,
        [subjects.batch_job("t", n) for n in "abc"],
    ),
}


async def connect(broker: EmbeddedServer) -> Bus:
    bus = await Bus.connect(broker.url, "test")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    return bus


def restart(broker: EmbeddedServer) -> None:
    """Restart the broker in order, so that it has written which messages are put off."""
    broker.stop()
    broker.start()


async def lose_tasks(bus: Bus, broker: EmbeddedServer) -> None:
    """Restart the broker, and wait until the worker has noticed the loss."""
    lost = asyncio.Event()
    bus.queues.on_tasks_lost(lost.set)
    restart(broker)
    await asyncio.wait_for(lost.wait(), ANSWER_S)


async def put(bus: Bus, task: str) -> None:
    await bus.publish(subjects.stage("renderer", "demo", "batch", task), task.encode(), task)


async def consume_tasks(bus: Bus, ack_wait_s: float = 30.0) -> Consumer:
    where = subjects.stage_filter("renderer", "demo", "batch")
    return await bus.queues.consume(subjects.STAGES_STREAM, QUEUE, where, 8, ack_wait_s)


async def test_a_worker_continues_with_new_tasks_when_earlier_ones_are_lost(
    own_bus: Bus,
    own_broker: EmbeddedServer,
) -> None:
    consumer = await consume_tasks(own_bus)
    await put(own_bus, "a")
    assert (await consumer.next()).data == b"a"
    restart(own_broker)
    await put(own_bus, "b")
    assert (await asyncio.wait_for(consumer.next(), ANSWER_S)).data == b"b"


async def test_queues_without_a_worker_are_there_again(
    own_bus: Bus, own_broker: EmbeddedServer
) -> None:
    where = subjects.stage_filter("renderer", "demo", "batch")
    queue = SlotQueue(None, QUEUE, where)
    await own_bus.queues.create_slots(subjects.STAGES_STREAM, [queue], 30.0)
    await lose_tasks(own_bus, own_broker)
    await put(own_bus, "a")
    depth = await until(lambda: own_bus.figures.depths(subjects.STAGES_STREAM), ANSWER_S)
    assert [(d.subject, d.num_pending) for d in depth] == [(where, 1)]


async def test_an_acknowledgement_of_a_lost_task_settles_nothing(
    own_bus: Bus, own_broker: EmbeddedServer, nats_client: NatsClient
) -> None:
    """Both tasks are the first ones of their streams."""
    consumer = await consume_tasks(own_bus, ack_wait_s=1.0)
    await put(own_bus, "a")
    lost = await consumer.next()
    await lose_tasks(own_bus, own_broker)
    await put(own_bus, "b")
    first = await asyncio.wait_for(consumer.next(), ANSWER_S)
    assert lost.is_lost
    assert not first.is_lost
    began = time.monotonic()
    await lost.ack()
    assert time.monotonic() - began < 0.5, "the server would not answer"
    # Another worker may not have noticed the loss.
    await nats_client.publish(lost.receipt, b"+ACK")
    again = await asyncio.wait_for(consumer.next(), ANSWER_S)
    assert (again.data, again.attempt) == (b"b", 2)
    await again.ack()


async def test_requests_are_delivered_again_when_their_tasks_are_lost(
    own_bus: Bus,
    own_broker: EmbeddedServer,
) -> None:
    consumer = await own_bus.queues.consume(*REQUESTS, 8, 1.0, feeds_tasks=True)
    for name in ("ended", "put-off", "new"):
        await own_bus.publish_without_id(subjects.request("demo", f"{name}@t"), name.encode())
    ended, put_off, _ = [await consumer.next() for _ in range(3)]
    await ended.ack()
    await put_off.retry(3600)
    await own_bus.connection.sync_clock()  # The broker has the acknowledgements.
    restart(own_broker)
    messages: set[bytes] = set()
    # The server delivers a request without an acknowledgement again even before the reset.
    while messages != {b"put-off", b"new"}:
        messages.add((await asyncio.wait_for(consumer.next(), ANSWER_S)).data)


@pytest.mark.parametrize("stream", QUEUES)
async def test_acknowledged_messages_that_were_not_removed_are_removed_after_a_restart(
    stream: str, own_bus: Bus, own_broker: EmbeddedServer, tmp_path: Path
) -> None:
    """A full disk stores the acknowledgement, and not the removal of the message."""
    durable, where, names = QUEUES[stream]
    feeds_tasks = stream == subjects.REQUESTS_STREAM
    queue = stream, durable, where, 8, 1.0
    consumer = await own_bus.queues.consume(*queue, feeds_tasks=feeds_tasks)
    for name in names:
        await own_bus.publish_without_id(name, name.encode())
    own_broker.stop()
    (messages,) = own_broker.store_dir.rglob(f"streams/{stream}/msgs")
    shutil.copytree(messages, tmp_path / "copy")
    own_broker.start()
    while (delivery := await consumer.next()).data != names[0].encode():
        pass
    await delivery.ack()
    await own_bus.connection.sync_clock()  # The broker has the acknowledgement.
    assert (await own_bus.figures.size(stream))[0] == 2
    own_broker.stop()
    shutil.rmtree(messages)
    shutil.copytree(tmp_path / "copy", messages)
    own_broker.start()

    async def is_removed() -> bool:
        with contextlib.suppress(Unavailable):
            return names[0] not in await own_bus.figures.subjects_of(stream, where)
        return False

    await until(is_removed)
    left = {*names[1:]}
    while left:
        delivery = await asyncio.wait_for(consumer.next(), ANSWER_S)
        left.discard(delivery.data.decode())
        await delivery.ack()
    await own_bus.connection.sync_clock()
    assert (await own_bus.figures.size(stream))[0] == 0


@pytest.mark.parametrize("storage", [api.StorageType.FILE, api.StorageType.MEMORY])
async def test_a_queue_of_requests_is_kept_while_their_tasks_are_there(
    own_broker: EmbeddedServer, storage: api.StorageType, jetstream: JetStreamContext
) -> None:
    """Tasks are on disk in a cluster, and in the streams of older versions."""
    bus = await connect(own_broker)
    if storage is api.StorageType.FILE:
        config = (await jetstream.stream_info(subjects.STAGES_STREAM)).config
        await jetstream.delete_stream(subjects.STAGES_STREAM)
        await jetstream.add_stream(config.evolve(storage=storage))
        bus.streams.tasks = await bus.streams.find_tasks()
    consumer = await bus.queues.consume(*REQUESTS, 8, 1.0, feeds_tasks=True)
    await bus.publish_without_id(subjects.request("demo", "put-off@t"), b"put-off")
    await (await consumer.next()).retry(3600)
    await bus.connection.sync_clock()  # The broker has the acknowledgements.
    if storage is api.StorageType.FILE:
        restart(own_broker)
        await put(bus, "a")
    await bus.queues.restore()
    # A coordinator that starts joins the same consumer.
    other = await connect(own_broker)
    await other.queues.consume(*REQUESTS, 8, 1.0, feeds_tasks=True)
    await bus.publish_without_id(subjects.request("demo", "r@t"), b"r")
    delivery = await asyncio.wait_for(consumer.next(), ANSWER_S)
    assert (delivery.data, delivery.attempt) == (b"r", 1)
    for each in (bus, other):
        await each.close()


async def test_a_coordinator_that_starts_finds_that_tasks_were_lost(
    own_broker: EmbeddedServer,
) -> None:
    first = await connect(own_broker)
    consumer = await first.queues.consume(*REQUESTS, 8, 1.0, feeds_tasks=True)
    await first.publish_without_id(subjects.request("demo", "r@t"), b"r")
    await (await consumer.next()).retry(3600)
    await first.close()
    restart(own_broker)
    second = await connect(own_broker)
    consumer = await second.queues.consume(*REQUESTS, 8, 1.0, feeds_tasks=True)
    assert (await asyncio.wait_for(consumer.next(), ANSWER_S)).data == b"r"
    await second.close()


async def test_a_migration_creates_a_stream_of_tasks_that_is_known_as_another_one(
    own_bus: Bus,
    jetstream: JetStreamContext,
) -> None:
    before = await own_bus.streams.find_tasks()
    await jetstream.delete_stream(subjects.STAGES_STREAM)
    await own_bus.streams.change(await own_bus.streams.find_changes(own_bus.now_ms()))
    assert (await own_bus.streams.find_tasks()).first_sequence > before.first_sequence


async def test_requests_do_not_count_as_new_before_it_is_known_whether_tasks_are_lost(
    own_bus: Bus,
) -> None:
    now_ms = own_bus.now_ms()
    assert own_bus.streams.tasks.since_ms <= now_ms
    own_bus._on_reconnect()
    assert own_bus.streams.tasks.since_ms == math.inf
    await own_bus.queues.restore()
    assert own_bus.streams.tasks.since_ms <= now_ms
