"""Publishing, consuming and settling messages on a real server."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from shared.bus.bus import Bus
from shared.bus.consumer import Consumer, Delivery
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.metering import LogUse, StreamMeter
from shared.bus.replies import Replies
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import PayloadTooLarge, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from tests.support.broker import break_connection, subscriptions_of
from tests.support.waiting import until


async def consume(bus: Bus, model: str, capacity: int = 4, ack_wait_s: float = 1.0) -> Consumer:
    return await bus.queues.consume(
        subjects.STAGES_STREAM,
        subjects.stage_consumer("renderer", model, "batch"),
        subjects.stage_filter("renderer", model, "batch"),
        capacity,
        ack_wait_s,
    )


async def put(bus: Bus, model: str, text: str) -> bool:
    return await bus.publish(
        subjects.stage("renderer", model, "batch", text), text.encode(), f"{model}:{text}"
    )


async def test_a_message_published_twice_is_delivered_once(bus: Bus, model: str) -> None:
    assert await put(bus, model, "a") is False
    assert await put(bus, model, "a") is True
    consumer = await consume(bus, model)
    delivery = await consumer.next()
    assert (delivery.data, delivery.attempt) == (b"a", 1)
    await delivery.ack()
    assert await put(bus, model, "a") is True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.next(), 0.3)


async def test_six_hundred_pulls_wait_at_one_consumer(
    bus: Bus, model: str, nats_client: NatsClient
) -> None:
    queue = subjects.STAGES_STREAM, subjects.stage_consumer("renderer", model, "batch")
    await bus.queues.create(*queue, subjects.stage_filter("renderer", model, "batch"), 30.0)
    inbox = nats_client.new_inbox()
    replies = await nats_client.subscribe(inbox)
    pull = to_json({"batch": 1, "expires": 60_000_000_000})
    for _ in range(600):
        await nats_client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{queue[0]}.{queue[1]}", pull, inbox)
    await nats_client.flush()
    for number in range(600):
        await put(bus, model, str(number))
    received = [await replies.next_msg(10) for _ in range(600)]
    assert [msg.headers for msg in received if (msg.headers or {}).get("Status")] == []


async def test_a_consumer_of_an_older_version_is_joined_and_keeps_its_limit_on_pulls(
    bus: Bus, model: str, jetstream: JetStreamContext
) -> None:
    stream, durable = subjects.STAGES_STREAM, subjects.stage_consumer("renderer", model, "batch")
    older = api.ConsumerConfig(
        durable_name=durable,
        filter_subject=subjects.stage_filter("renderer", model, "batch"),
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=7.0,
        max_ack_pending=-1,
    )
    await jetstream.add_consumer(stream, older)
    await put(bus, model, "a")
    consumer = await consume(bus, model, ack_wait_s=9.0)
    assert (await consumer.next()).data == b"a"
    settings = (await jetstream.consumer_info(stream, durable)).config
    assert (settings.ack_wait, settings.max_waiting) == (9.0, 512)
    # The older version still joins it.
    await jetstream.add_consumer(stream, older)


async def test_an_unsettled_message_is_redelivered(bus: Bus, model: str) -> None:
    await put(bus, model, "a")
    consumer = await consume(bus, model, ack_wait_s=0.5)
    first = await consumer.next()
    second = await asyncio.wait_for(consumer.next(), 5)
    assert (first.attempt, second.attempt) == (1, 2)
    await second.ack()


async def test_progress_prevents_redelivery(bus: Bus, model: str) -> None:
    await put(bus, model, "a")
    consumer = await consume(bus, model, ack_wait_s=0.6)
    delivery = await consumer.next()
    for _ in range(6):
        await delivery.progress()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consumer.next(), 0.2)
    await delivery.ack()


async def test_a_retry_is_redelivered_after_its_delay(bus: Bus, model: str) -> None:
    await put(bus, model, "a")
    consumer = await consume(bus, model, ack_wait_s=10)
    began = time.monotonic()
    await (await consumer.next()).retry(0.5)
    again = await asyncio.wait_for(consumer.next(), 5)
    assert time.monotonic() - began >= 0.5
    assert again.attempt == 2
    await again.ack()


async def test_one_receipt_is_acknowledged_by_two_deliveries(bus: Bus, model: str) -> None:
    """A broker that was killed delivers again what it does not know to be delivered."""
    consumer = await consume(bus, model)
    await put(bus, model, "a")
    first = await consumer.next()
    again = Delivery(first._msg, consumer, consumer._acks)
    consumer.num_in_flight += 1
    async with asyncio.timeout(10):
        await asyncio.gather(first.ack(), again.ack())
    assert consumer.num_in_flight == 0
    await consumer.stop()


async def test_no_more_messages_are_in_flight_than_the_capacity(bus: Bus, model: str) -> None:
    for number in range(10):
        await put(bus, model, str(number))
    consumer = await consume(bus, model, capacity=3, ack_wait_s=30)
    held = [await consumer.next() for _ in range(3)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.next(), 0.3)
    assert consumer.num_in_flight == 3
    for delivery in held:
        await delivery.ack()
    rest = []
    for _ in range(7):
        delivery = await asyncio.wait_for(consumer.next(), 5)
        await delivery.ack()
        rest.append(delivery.data)
    assert rest == [str(number).encode() for number in range(3, 10)]


async def test_two_workers_share_the_work(bus: Bus, model: str) -> None:
    consumer, two = await consume(bus, model, capacity=1), await consume(bus, model, capacity=1)
    await put(bus, model, "a")
    await put(bus, model, "b")
    first = await asyncio.wait_for(consumer.next(), 5)
    second = await asyncio.wait_for(two.next(), 5)
    assert {first.data, second.data} == {b"a", b"b"}
    await first.ack()
    await second.ack()


async def test_a_stopped_consumer_receives_no_messages(bus: Bus, model: str) -> None:
    consumer = await consume(bus, model)
    await consumer.stop()
    await put(bus, model, "a")
    other = await consume(bus, model)
    assert (await asyncio.wait_for(other.next(), 5)).data == b"a"


async def test_the_logs_under_a_subject_are_measured(bus: Bus, model: str) -> None:
    last = await bus.append(subjects.append(model, "one"), bytes(10), 0)
    last = await bus.append(subjects.append(model, "one"), bytes(20), last)
    last = await bus.append(subjects.append(model, "two"), bytes(5), 0)
    logs = subjects.TOKENS_STREAM, subjects.tokens(model, "*")
    use = await StreamMeter(bus).measure_logs(*logs, LogUse())
    assert use == LogUse(num_logs=2, num_bytes=35, next_sequence=last + 1)
    assert await StreamMeter(bus).measure_logs(*logs, use) == use


async def test_a_message_over_the_limit_is_refused(bus: Bus, model: str) -> None:
    with pytest.raises(PayloadTooLarge, match=str(bus.max_payload - 1024)):
        await bus.publish_without_id(subjects.request(model, "too-large"), bytes(bus.max_payload))


async def test_a_missing_server_is_reported_with_its_url() -> None:
    with pytest.raises(Unavailable, match=r"nats://127\.0\.0\.1:1"):
        await Bus.connect("nats://127.0.0.1:1", "test", timeout_s=0.5)


async def test_requests_survive_a_connection_that_is_being_lost(broker: EmbeddedServer) -> None:
    """nats-py writes in the caller's task when its writer has ended before its reader notices."""
    bus = await Bus.connect(broker.url, "test-lost")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())

    async def lose_connection() -> None:
        writer = bus.connection.nc._flusher_task
        assert writer is not None
        writer.cancel()
        await asyncio.sleep(0)
        break_connection(bus)

    await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens("nobody"))
    num_subscriptions = len(subscriptions_of(bus))
    for _ in range(3):
        await lose_connection()
        assert await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens("nobody")) is None
    listener = await bus.subscribe(subjects.tokens("nobody"))
    await lose_connection()
    await bus.publish(subjects.cancel("nobody"), b"", f"lost-{secrets.token_hex(4)}")
    await bus.unsubscribe(listener)
    assert len(subscriptions_of(bus)) == num_subscriptions
    await bus.close()


async def test_a_cancelled_flush_does_not_stop_the_reader_task(broker: EmbeddedServer) -> None:
    """nats-py's reader task would fail on a pong after its future was cancelled."""
    bus = await Bus.connect(broker.url, "test-deaf")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    nc = bus.connection.nc
    for _ in range(3):
        flushing = asyncio.create_task(nc.flush())
        while not nc._pongs:  # noqa: ASYNC110
            await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)
    assert await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens("nobody")) is None
    assert nc.stats["reconnects"] == 0
    await bus.close()


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("waits_for", ["an answer", "the server", "one of several answers"])
async def test_a_cancellation_together_with_the_reply_is_not_lost(
    broker: EmbeddedServer, waits_for: str, steps: int
) -> None:
    """nats-py loses a cancellation in one of the loop steps between the reply and the caller."""
    bus = await Bus.connect(broker.url, "test-cancelled")
    nc, replies = bus.connection.nc, Replies()
    await nc.subscribe("test.cancelled")

    async def wait() -> None:
        match waits_for:
            case "an answer":
                await nc.request("test.cancelled", b"", timeout=60)
            case "the server":
                await nc.flush(timeout=60)
            case _:
                await replies.next(60.0)

    def has_begun() -> bool:
        waiting_for_replies = [*nc.inbox._open.values(), replies]
        return bool(nc._pongs) or any(each._waiter for each in waiting_for_replies)

    waiting = asyncio.create_task(wait())
    while not has_begun():  # noqa: ASYNC110
        await asyncio.sleep(0)
    match waits_for:
        case "an answer":
            next(iter(nc.inbox._open.values())).add(Msg(nc))
        case "the server":
            nc._pongs[-1].set_result(None)
        case _:
            replies.add(Msg(nc))
    for _ in range(steps):
        await asyncio.sleep(0)
    in_time = waiting.cancel()
    (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
    assert in_time == isinstance(outcome, asyncio.CancelledError)
    await bus.close()


@pytest.mark.parametrize("data", [b"", b"\xff", b"{}", b"[" * 10_000, b'{"role":5}'])
async def test_bytes_that_are_no_heartbeat_are_skipped(bus: Bus, data: bytes) -> None:
    beat = Heartbeat("test", f"test-{secrets.token_hex(4)}", "0", 1, [], {})
    await bus.heartbeats.publish(beat.worker, to_json(beat))
    await bus.heartbeats.publish(f"foreign-{secrets.token_hex(4)}", data)
    assert beat in await bus.heartbeats.read()


async def publish_a_message(bus: Bus) -> None:
    subject = subjects.dead("engine", "r")
    await bus.publish(subject, b"r", "r")
    (stored,) = await bus.read(subjects.DEAD_STREAM, subject)
    assert stored.data == b"r"


async def read_a_stream(bus: Bus) -> None:
    assert await bus.read_last(subjects.DEAD_STREAM, subjects.dead("engine", "r")) is None


async def request_a_reply(bus: Bus) -> None:
    assert await bus.request("test.echo", b"r", 60.0) == b"r"


@pytest.mark.parametrize("work", [publish_a_message, read_a_stream, request_a_reply])
async def test_work_whose_connection_is_lost_continues_over_the_next_one(
    own_bus: Bus,
    own_broker: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Bus], Coroutine[Any, Any, None]],
) -> None:
    """It does not wait for a reply, which comes only over its own connection."""
    for module in ("bus", "reading"):
        monkeypatch.setattr(f"shared.bus.{module}.REPLY_TIMEOUT_S", 60.0)
    await own_bus.add_responder("test.echo", lambda data: data)
    await read_a_stream(own_bus)  # Subscribes to replies.
    stats = own_bus.connection.nc.stats
    os.kill(int(own_broker.pid_file.read_text()), signal.SIGSTOP)
    num_sent, working = stats["out_msgs"], asyncio.create_task(work(own_bus))
    await until(lambda: stats["out_msgs"] > num_sent)
    own_broker.kill()
    own_broker.start()
    async with asyncio.timeout(30):
        await working


@pytest.mark.parametrize(
    "command",
    [
        b"PUB test.\xff 0\r\n\r\n",
        b"PUB test.a\x0c1\x0c2 0\r\n\r\n",
        b"PUB test." + 4000 * b"a" + b" 0\r\n\r\n",
        b"HPUB test.h 1 1\r\na\r\n",
        b"HPUB test.h 8 8\r\nNATS/1.0\r\n",
        b"HPUB test.h 18 18\r\nNATS/1.0\r\na: \xff\r\n\r\n\r\n",
    ],
    ids=["not UTF-8", "form feeds", "long", "no headers", "only a version", "header not UTF-8"],
)
async def test_no_bytes_of_a_client_end_the_connection_that_receives_them(
    own_bus: Bus, own_broker: EmbeddedServer, command: bytes
) -> None:
    """Names in subjects, and headers, are any bytes of a client."""
    nc = own_bus.connection.nc
    received = await nc.subscribe("test.>")
    await nc.flush()
    sender = await nats.connect(own_broker.url)
    await sender._send_command(command)
    await sender.publish("test.next", b"next")
    await sender.flush()
    await received.next_msg(20)
    assert (await received.next_msg(20)).data == b"next"
    assert nc.stats["reconnects"] == 0
    await sender.close()
