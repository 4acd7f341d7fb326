"""Settling: hand over once, retry what is ours, keep what is given up, always tell the client."""

import asyncio
import secrets

import msgspec
import pytest

from shared import subjects
from shared.bus import Bus
from shared.config import DeliveryConfig
from shared.consumer import Consumer, Delivery
from shared.errors import Fenced, InvalidMedia
from shared.messages import DeadLetter, Failure
from shared.stage import Stage, serve
from shared.tokenlog import read_log

POLICY = DeliveryConfig(max_deliver=2, retry_delay_s=0.1, ack_wait_s=0.5)


@pytest.fixture
def model() -> str:
    return f"m-{secrets.token_hex(4)}"


@pytest.fixture
def request_id() -> str:
    return f"t-{secrets.token_hex(6)}"


def make_stage(bus: Bus) -> Stage:
    return Stage(bus, "renderer", "renderer-test", "0", POLICY)


async def consume(bus: Bus, role: str, model: str) -> Consumer:
    return await bus.consume(
        subjects.STAGES_STREAM,
        subjects.stage_consumer(role, model, "interactive"),
        subjects.stage(role, model, "interactive"),
        4,
        POLICY.ack_wait_s,
    )


async def put(bus: Bus, model: str, request_id: str) -> None:
    subject = subjects.stage("renderer", model, "interactive")
    await bus.publish(subject, b"task", f"{request_id}:renderer")


async def assert_nothing_more(consumer: Consumer, within_s: float = 1.0) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.next(), within_s)


async def dead_letter(bus: Bus, request_id: str) -> DeadLetter | None:
    """DEAD is not read by subject on the hot path, so the test looks through all of it."""
    letters = [
        msgspec.msgpack.decode(stored.data, type=DeadLetter)
        for stored in await bus.read(subjects.DEAD_STREAM, subjects.dead("renderer"))
    ]
    return next((letter for letter in letters if letter.request_id == request_id), None)


async def test_a_crash_between_publish_and_ack_hands_over_once(
    bus: Bus, model: str, request_id: str
) -> None:
    stage = make_stage(bus)
    inbox = await consume(bus, "renderer", model)
    await put(bus, model, request_id)
    first = await inbox.next()
    await bus.publish(
        subjects.stage("engine", model, "interactive"), b"rendered", f"{request_id}:engine"
    )
    first.abandon()
    again = await asyncio.wait_for(inbox.next(), 5)
    assert again.attempt == 2
    await stage.hand_over(again, request_id, "engine", model, "interactive", b"rendered")
    outbox = await consume(bus, "engine", model)
    await (await outbox.next()).ack()
    await assert_nothing_more(outbox)
    await assert_nothing_more(inbox)


async def test_a_clients_error_is_answered_and_settled(
    bus: Bus, model: str, request_id: str
) -> None:
    inbox = await consume(bus, "renderer", model)
    await put(bus, model, request_id)
    error = InvalidMedia("no picture", field="messages[0]")
    await make_stage(bus).settle_failure(await inbox.next(), request_id, error, [])
    (record,) = await read_log(bus, request_id)
    assert isinstance(record, Failure)
    assert (record.error.code, record.error.field) == ("invalid_media", "messages[0]")
    await assert_nothing_more(inbox)
    assert await dead_letter(bus, request_id) is None


async def test_our_own_error_is_retried_then_kept_and_told(
    bus: Bus, model: str, request_id: str
) -> None:
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await put(bus, model, request_id)
    for attempt in (1, 2):
        delivery = await asyncio.wait_for(inbox.next(), 5)
        assert delivery.attempt == attempt
        error = RuntimeError("secret at 0x7f00")
        await stage.settle_failure(delivery, request_id, error, [])
    (record,) = await read_log(bus, request_id)
    assert isinstance(record, Failure)
    assert record.error.code == "worker_failure"
    assert "secret" not in record.error.message
    letter = await dead_letter(bus, request_id)
    assert letter is not None
    assert (letter.attempts, letter.input, letter.worker) == (2, b"task", "renderer-test")
    assert "secret" in letter.traceback
    await assert_nothing_more(inbox)


async def test_who_is_fenced_off_says_nothing(bus: Bus, model: str, request_id: str) -> None:
    inbox = await consume(bus, "renderer", model)
    await put(bus, model, request_id)
    await make_stage(bus).settle_failure(await inbox.next(), request_id, Fenced("late"), [])
    assert await read_log(bus, request_id) == []
    # Whoever holds the log now finishes the request; if it died too, the message comes again.
    await (await asyncio.wait_for(inbox.next(), 5)).ack()


async def test_a_drain_finishes_what_is_in_hand_and_hands_back_the_rest(
    bus: Bus, model: str
) -> None:
    inbox, stopping = await consume(bus, "renderer", model), asyncio.Event()
    quick, slow = f"q-{model}", f"s-{model}"
    await put(bus, model, quick)
    await put(bus, model, slow)
    begun: list[Delivery] = []
    finished: list[str | None] = []

    async def handle(delivery: Delivery) -> None:
        begun.append(delivery)
        if len(begun) == 2:
            stopping.set()
        await asyncio.sleep(0.2 if delivery.msg_id == f"{quick}:renderer" else 60)
        await delivery.ack()
        finished.append(delivery.msg_id)

    await serve(inbox, handle, stopping, drain_s=0.4)
    assert finished == [f"{quick}:renderer"]
    other = await consume(bus, "renderer", model)
    again = await asyncio.wait_for(other.next(), 5)
    assert (again.msg_id, again.attempt) == (f"{slow}:renderer", 2)
    await again.ack()
