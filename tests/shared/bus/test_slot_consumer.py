"""One worker's pulls from the queues of all slots, on a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import pytest
from nats.js import JetStreamContext

from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.slot_consumer import WAIT_S, SlotConsumer, SlotQueue
from shared.protocol import subjects
from tests.support.broker import break_connection
from tests.support.waiting import until

LANE = "batch"
SLOTS = range(4)


@pytest.fixture
async def other(broker: EmbeddedServer) -> AsyncIterator[Bus]:
    connection = await Bus.connect(broker.url, "other")
    yield connection
    await connection.close()


def queue_of(model: str, slot: int | None) -> SlotQueue:
    return SlotQueue(
        slot,
        subjects.stage_consumer("engine", model, LANE, slot),
        subjects.stage_filter("engine", model, LANE, slot),
    )


async def consume(
    bus: Bus,
    model: str,
    owned: Iterable[int],
    capacity: int = 16,
    ack_wait_s: float = 30.0,
    load: Callable[[], float] = lambda: 0.0,
) -> SlotConsumer:
    """Return a consumer with a waiting pull at every queue."""
    queues = [queue_of(model, slot) for slot in (None, *SLOTS)]
    stream = subjects.STAGES_STREAM
    consumer = await bus.queues.consume_slots(stream, queues, capacity, ack_wait_s, load)
    consumer.set_owned({*owned})
    consumer.on_reconnect()
    await until(lambda: all(queue.waits for queue in consumer.queues.values()))
    return consumer


async def put(bus: Bus, model: str, name: str, slot: int | None) -> None:
    subject = subjects.stage("engine", model, LANE, name, slot)
    await bus.publish(subject, name.encode(), f"{model}:{name}")


async def take(consumer: SlotConsumer) -> Delivery:
    return await asyncio.wait_for(consumer.next(), 10)


async def test_an_owner_gets_what_is_in_its_slots(bus: Bus, other: Bus, model: str) -> None:
    thief = await consume(other, model, owned=[])
    owner = await consume(bus, model, owned=SLOTS)
    for number in range(12):
        await put(bus, model, str(number), number % 4)
        await (await take(owner)).ack()
    assert thief.num_in_flight == 0


async def test_an_idle_thief_comes_before_a_busy_owner(bus: Bus, other: Bus, model: str) -> None:
    owner = await consume(bus, model, owned=SLOTS, load=lambda: 0.9)
    thief = await consume(other, model, owned=[])
    await put(bus, model, "a", 1)
    assert (await take(thief)).data == b"a"
    assert owner.num_in_flight == 0


async def test_tasks_beyond_the_capacity_of_a_full_owner_are_stolen_at_once(
    bus: Bus, other: Bus, model: str
) -> None:
    owner = await consume(bus, model, owned=SLOTS, capacity=2)
    thief = await consume(other, model, owned=[], capacity=3)
    for number in range(5):
        await put(bus, model, str(number), 2)
    stolen = [(await take(thief)).data for _ in range(3)]
    own = [(await take(owner)).data for _ in range(2)]
    assert sorted(stolen + own) == [b"0", b"1", b"2", b"3", b"4"]


async def test_tasks_beyond_the_credit_are_requeued(bus: Bus, other: Bus, model: str) -> None:
    """The pulls that wait are more than the credit, because most queues are empty."""
    owner = await consume(bus, model, owned=SLOTS, capacity=1)
    for slot in SLOTS:
        await put(bus, model, str(slot), slot)
    delivery = await take(owner)
    await until(lambda: owner.num_in_flight == 1)
    two = await consume(other, model, owned=[])
    others = [(await take(two)).data for _ in range(3)]
    assert sorted([delivery.data, *others]) == [b"0", b"1", b"2", b"3"]
    assert owner.num_in_flight == 1


async def test_an_owner_sends_its_next_pull_before_the_last_one_ends(bus: Bus, model: str) -> None:
    """Between two pulls, a thief's would be served although the owner is idle."""
    owner = await consume(bus, model, owned=SLOTS)
    before = [queue.pull for queue in owner.queues.values()]
    await asyncio.sleep(0.8 * WAIT_S)
    after = [queue.pull for queue in owner.queues.values()]
    assert all(earlier < other for earlier, other in zip(before, after, strict=True))


async def test_a_hot_queue_is_pulled_up_to_the_free_capacity(bus: Bus, model: str) -> None:
    for number in range(30):
        await put(bus, model, str(number), 2)
    queues = [queue_of(model, slot) for slot in (None, *SLOTS)]
    stream = subjects.STAGES_STREAM
    consumer = await bus.queues.consume_slots(stream, queues, 30, 30.0, lambda: 0.0)
    consumer.set_owned(SLOTS)
    for _ in range(30):
        assert (await take(consumer)).attempt == 1
    # One or two for each queue, and one for the backlog.
    assert consumer.num_pulls < 15


async def test_a_backlog_is_taken_as_credit_becomes_free(bus: Bus, model: str) -> None:
    for number in range(10):
        await put(bus, model, str(number), number % 4 if number < 8 else None)
    queues = [queue_of(model, slot) for slot in (None, *SLOTS)]
    stream, messages = subjects.STAGES_STREAM, set[bytes]()
    consumer = await bus.queues.consume_slots(stream, queues, 2, 30.0, lambda: 0.0)
    for _ in range(10):
        delivery = await take(consumer)
        # Nothing was pulled beyond the credit and requeued.
        assert delivery.attempt == 1
        assert consumer.num_in_flight <= 2
        messages.add(delivery.data)
        await delivery.ack()
    assert len(messages) == 10


async def test_nothing_is_pulled_without_credit(bus: Bus, model: str) -> None:
    consumer = await consume(bus, model, owned=SLOTS, capacity=1)
    await put(bus, model, "a", 0)
    first = await take(consumer)
    await asyncio.sleep(WAIT_S)
    await put(bus, model, "b", 0)
    await first.ack()
    assert (await take(consumer)).attempt == 1


async def test_a_frozen_owner_loses_its_slots_after_the_ack_wait(
    bus: Bus, other: Bus, model: str
) -> None:
    """It keeps what its pulls were given, for the ack wait at most, and pulls no more."""
    ack_wait_s = 1.0
    frozen = await consume(bus, model, owned=SLOTS, ack_wait_s=ack_wait_s)
    pump = frozen._pump
    assert pump is not None
    pump.cancel()
    thief = await consume(other, model, owned=[], ack_wait_s=ack_wait_s)
    names = {str(number).encode() for number in range(12)}
    for name in names:
        await put(bus, model, name.decode(), int(name) % 4)
    messages = set[bytes]()
    async with asyncio.timeout(ack_wait_s + 2):
        while messages < names:
            delivery = await thief.next()
            messages.add(delivery.data)
            await delivery.ack()
    assert frozen.num_in_flight > 0


async def test_pulls_that_the_broker_refuses_are_sent_again(
    bus: Bus, model: str, jetstream: JetStreamContext
) -> None:
    consumer = await consume(bus, model, owned=SLOTS)
    slot, durable, subject = queue_of(model, 3)
    await jetstream.delete_consumer(subjects.STAGES_STREAM, durable)
    await until(lambda: consumer.queues[durable].backlog is None)
    await put(bus, model, "a", slot)
    stream = subjects.STAGES_STREAM
    await bus.queues.create(stream, durable, subject, 30.0, is_prioritized=True)
    assert (await take(consumer)).data == b"a"


async def test_pulls_end_with_their_connection_and_are_sent_again(
    bus: Bus, other: Bus, model: str
) -> None:
    # The broker may have the message before the end of the connection, and sends it there.
    consumer = await consume(bus, model, owned=SLOTS, ack_wait_s=1.0)
    break_connection(bus)
    await put(other, model, "a", 1)
    assert (await take(consumer)).data == b"a"


async def test_pulls_are_few_while_nothing_happens(bus: Bus, model: str) -> None:
    consumer = await consume(bus, model, owned=[0])
    before = consumer.num_pulls
    await asyncio.sleep(1.5)
    assert consumer.num_pulls - before <= 3 * len(consumer.queues)
