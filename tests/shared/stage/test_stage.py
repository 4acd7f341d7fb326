"""Settling: forward once, retry our own failures, store dead letters, always answer the client."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from ops.token_logs import read_log
from shared.blobs.store import Blobs
from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer, Delivery
from shared.bus.reading import StoredMessage
from shared.config.schema import BlobsConfig, DeliveryConfig, ModelConfig
from shared.errors import (
    BlobLost,
    Cancelled,
    DecodeError,
    Fenced,
    InvalidMedia,
    Poisoned,
    Unavailable,
)
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import AttemptRecord, DeadLetter, decode_attempt
from shared.protocol.multimodal import BlobRef
from shared.protocol.pipeline import Pipeline
from shared.protocol.records import ChoiceDelta, Failure
from shared.protocol.requests import GenerateRequest, Message, decode_request
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, RenderBody, RequestTicket, TaskHeader
from shared.stage import tasks
from shared.stage.job import Job
from shared.stage.pipelines import pipeline_of
from shared.stage.runtime import Shutdown
from shared.stage.stage import Stage
from shared.stage.worker_loop import serve
from shared.state import dead_letters, output_ends
from shared.state.token_log import LogWriter, end_request
from shared.telemetry.deltas import samples_of, total
from shared.telemetry.metrics import Metrics
from tests.accepted import consume_requests, next_request

PIPELINE = pipeline_of(ModelConfig("nowhere"))
TO_ENGINE = PIPELINE.edges_into("engine")[0]
RENDERED, AGAIN = EngineBody([1], []), EngineBody([2], [])
POLICY = DeliveryConfig(max_deliver=2, retry_delay_s=0.1, ack_wait_s=0.5)


class EveryModel(dict[str, Pipeline]):
    """The default pipeline for every model."""

    def get(self, model: str, default: Any = None) -> Pipeline:
        return PIPELINE


def make_stage(bus: Bus, worker: str = "renderer-test", name: str = "renderer") -> Stage:
    return Stage(bus, name, worker, "0", POLICY, Metrics(name, worker), EveryModel())


async def consume(
    bus: Bus, role: str, model: str, ack_wait_s: float = POLICY.ack_wait_s
) -> Consumer:
    return await bus.queues.consume(
        subjects.STAGES_STREAM,
        subjects.stage_consumer(role, model, "interactive"),
        subjects.stage_filter(role, model, "interactive"),
        4,
        ack_wait_s,
    )


async def put(
    bus: Bus, model: str, request_id: str, data: bytes = b"task", stage: str = "renderer"
) -> None:
    subject = subjects.stage(stage, model, "interactive", request_id)
    await bus.publish(subject, data, f"{request_id}:{secrets.token_hex(4)}")


async def next_job(stage: Stage, inbox: Consumer, accepted: RequestTicket | None = None) -> Job:
    job = stage.receive(await asyncio.wait_for(inbox.next(), 5))
    assert job is not None
    if accepted is not None:
        assert job.request_id is not None
        _, model, lane = subjects.parts_of_stage(job.delivery.subject)
        job.identify(TaskHeader(job.request_id, model, lane, accepted))
    return job


async def publish(job: Job, stage: Stage, body: EngineBody, round: int = 0) -> None:
    """Publish the engine's task, and drop the references to its payloads."""
    assert job.header is not None
    header = msgspec.structs.replace(job.header, round=round)
    if await tasks.publish(stage.bus, TO_ENGINE, header, body, [], job.outputs):
        job.outputs.clear()


async def accept(bus: Bus, model: str, request_id: str) -> tuple[RequestTicket, bytes]:
    """A client's request, taken by a coordinator and put off for long."""
    request = to_json(GenerateRequest(model, [Message("user", "?")]))
    subject = subjects.request(model, request_id)
    inbox = await consume_requests(bus)
    await bus.publish_without_id(subject, request)
    delivery = await next_request(inbox, model)
    await delivery.retry(600)
    await inbox.stop()
    return RequestTicket(0.0, 0.0, delivery.sequence, delivery.receipt), request


async def assert_nothing_more(consumer: Consumer, within_s: float = 1.0) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.next(), within_s)


async def dead_letter(bus: Bus, request_id: str) -> DeadLetter | None:
    stored = await bus.read_last(subjects.DEAD_STREAM, subjects.dead_of(request_id))
    return None if stored is None else msgspec.msgpack.decode(stored.data, type=DeadLetter)


async def attempts(bus: Bus, request_id: str) -> list[AttemptRecord]:
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    records = []
    for message in stored:
        attempt = decode_attempt(message.data)
        assert attempt is not None
        records.append(attempt)
    return records


async def test_a_job_delivered_again_during_its_acknowledgement_is_dropped(
    bus: Bus, model: str, request_id: str
) -> None:
    stage = make_stage(bus)
    inbox = await consume(bus, "renderer", model)
    await put(bus, model, request_id)
    job = await next_job(stage, inbox, RequestTicket(0.0, 0.0, 1, ""))
    assert await stage.claim(job) is not None
    again = await asyncio.wait_for(inbox.next(), 5)
    acknowledging = asyncio.Event()
    ack = job.delivery.ack

    async def slow_ack() -> None:
        acknowledging.set()
        await asyncio.sleep(0.05)
        await ack()

    job.delivery.ack = slow_ack  # type: ignore[method-assign]
    forwarding = asyncio.create_task(stage.forward(job, RENDERED))
    await acknowledging.wait()
    assert stage.receive(again) is None
    await forwarding
    # On a busy machine it has come once more by now.
    async with asyncio.timeout(30):
        while inbox.num_in_flight:
            assert stage.receive(await inbox.next()) is None


async def test_a_crash_between_publish_and_ack_hands_over_once(
    bus: Bus, model: str, request_id: str
) -> None:
    stage = make_stage(bus)
    inbox = await consume(bus, "renderer", model)
    await put(bus, model, request_id)
    accepted = RequestTicket(0.0, 0.0, 1, "")
    first = await next_job(stage, inbox, accepted)
    await publish(first, stage, RENDERED)
    first.delivery.abandon()
    again = await next_job(stage, inbox, accepted)
    assert again.delivery.attempt == 2
    await stage.forward(again, RENDERED)
    outbox = await consume(bus, "engine", model)
    await (await outbox.next()).ack()
    await assert_nothing_more(outbox)
    await assert_nothing_more(inbox)


async def test_work_is_queued_once_even_under_another_message_id(
    bus: Bus, model: str, request_id: str
) -> None:
    """The window in which the server remembers message ids is over sooner than a long request."""
    await put(bus, model, request_id)
    await put(bus, model, request_id)
    inbox = await consume(bus, "renderer", model)
    await (await inbox.next()).ack()
    await assert_nothing_more(inbox)


async def test_a_clients_error_is_answered_and_settled(
    bus: Bus, model: str, request_id: str
) -> None:
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await put(bus, model, request_id)
    error = InvalidMedia("no picture", field="messages[0]")
    await stage.fail(await next_job(stage, inbox), error)
    (record,) = await read_log(bus, request_id)
    assert isinstance(record, Failure)
    assert (record.error.code, record.error.field) == ("invalid_media", "messages[0]")
    await assert_nothing_more(inbox)
    assert await dead_letter(bus, request_id) is None


async def test_our_own_error_is_retried_then_stored_and_answered(
    bus: Bus, model: str, request_id: str
) -> None:
    accepted, request = await accept(bus, model, request_id)
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await put(bus, model, request_id)
    for attempt in (1, 2):
        job = await next_job(stage, inbox, accepted)
        assert job.delivery.attempt == attempt
        assert await stage.claim(job) is not None
        await stage.fail(job, RuntimeError("secret at 0x7f00"))
    (record,) = await read_log(bus, request_id)
    assert isinstance(record, Failure)
    assert record.error.code == "worker_failure"
    assert "secret" not in record.error.message
    letter = await dead_letter(bus, request_id)
    assert letter is not None
    assert (letter.attempts, letter.input, letter.worker) == (2, b"task", "renderer-test")
    assert letter.request == request
    assert [attempt.outcome for attempt in letter.history] == ["open", "failed", "open"]
    assert {attempt.model for attempt in letter.history} == {model}
    assert "secret" in letter.traceback
    await assert_nothing_more(inbox)
    # Whoever ends a request acknowledges it where it was accepted.
    assert await request_queue.queued_request(bus, accepted.place) is None


async def test_an_unreadable_task_ends_its_request_at_once(
    bus: Bus, model: str, request_id: str
) -> None:
    """Without a word of the request in it, and so without its receipt."""
    request_id = f"{request_id}@somebody"
    accepted, request = await accept(bus, model, request_id)
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    subject = subjects.stage("renderer", model, "interactive", request_id)
    msg_id = subjects.stage_msg_id("renderer", request_id, accepted.place, 0)
    await bus.publish(subject, b"garbage", msg_id)
    await stage.fail(await next_job(stage, inbox), DecodeError("what is this"))
    (record,) = await read_log(bus, request_id)
    assert isinstance(record, Failure)
    assert record.error.code == "undecodable_message"
    assert await request_queue.queued_request(bus, accepted.place) is None
    letter = await dead_letter(bus, request_id)
    assert letter is not None
    assert (letter.request, letter.tenant, letter.input) == (request, "somebody", b"garbage")
    await assert_nothing_more(inbox)


async def test_an_unreadable_task_ends_no_other_request(
    bus: Bus, model: str, request_id: str
) -> None:
    accepted, _ = await accept(bus, model, f"{request_id}-other")
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    subject = subjects.stage("renderer", model, "interactive", request_id)
    msg_id = subjects.stage_msg_id("renderer", f"{request_id}-other", accepted.place, 0)
    await bus.publish(subject, b"garbage", msg_id)
    await stage.fail(await next_job(stage, inbox), DecodeError("what is this"))
    assert await request_queue.queued_request(bus, accepted.place) is not None
    assert await bus.acknowledge(accepted.receipt)


async def test_a_stage_counts_what_becomes_of_its_work(
    bus: Bus, model: str, request_id: str
) -> None:
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await put(bus, model, request_id)
    for _ in range(2):
        job = await next_job(stage, inbox)
        await stage.claim(job)
        await stage.fail(job, RuntimeError("twice"))
    await put(bus, model, f"{request_id}-2")
    await stage.fail(await next_job(stage, inbox), InvalidMedia("no picture"))
    samples = samples_of(stage.metrics.snapshot())
    counts = {
        name: total(samples, name, model=model)
        for name in ("stage_redeliveries_total", "stage_retries_total", "stage_dead_letters_total")
    }
    assert counts == dict.fromkeys(counts, 1)
    assert total(samples, "stage_retries_total", code="worker_failure") == 1
    assert total(samples, "request_errors_total", code="worker_failure") == 1
    assert total(samples, "request_errors_total", code="invalid_media") == 1
    assert total(samples, "stage_queue_seconds_bucket", model=model, le="inf") == 2
    assert total(samples, "stage_handling_seconds_bucket", model=model, le="inf") == 2


async def test_a_dead_letter_is_sent_again_as_if_it_had_never_been_tried(
    bus: Bus, model: str, request_id: str
) -> None:
    request_id = f"{request_id}@somebody"
    accepted, request = await accept(bus, model, request_id)
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await put(bus, model, request_id)
    job = await next_job(stage, inbox, accepted)
    await stage.claim(job)
    await stage.fail(job, Poisoned("twice dead"))
    assert len(await read_log(bus, request_id)) == 1
    await dead_letters.requeue(bus, request_id, decode_request(request))
    assert await read_log(bus, request_id) == []
    assert await attempts(bus, request_id) == []
    assert await dead_letter(bus, request_id) is None
    requests = await consume_requests(bus)
    delivery = await next_request(requests, model)
    assert (delivery.data, subjects.id_in(delivery.subject)) == (request, request_id)
    await delivery.ack()
    await requests.stop()


async def test_all_logs_of_a_dead_letter_are_removed_before_it_is_sent_again(
    bus: Bus, model: str, request_id: str
) -> None:
    """A closed output, or the list of the ends, would end the request without an answer."""
    await output_ends.begin(bus, request_id, ["text", "speech"])
    await end_request(bus, request_id, 1, Poisoned("twice dead"), [])
    assert (await LogWriter.open(bus, request_id, 1, "speech")).closed
    request = GenerateRequest(model, [Message("user", "?")])
    await dead_letters.requeue(bus, request_id, request)
    assert await output_ends.expected(bus, request_id) == []
    assert not (await LogWriter.open(bus, request_id, 1, "speech")).records
    assert await read_log(bus, request_id) == []


async def test_the_other_tasks_of_a_request_that_is_given_up_are_removed(
    bus: Bus, model: str, request_id: str
) -> None:
    """Otherwise they stay for a request's longest time where no worker serves their stage."""
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await put(bus, model, request_id)
    await bus.publish(subjects.stage("talker", model, "batch", request_id), b"", request_id)
    await stage.fail(await next_job(stage, inbox), Poisoned("twice dead"))
    assert len(await read_log(bus, request_id)) == 1
    assert await bus.read(subjects.STAGES_STREAM, subjects.stages_of(request_id)) == []


async def test_who_is_fenced_off_says_nothing(bus: Bus, model: str, request_id: str) -> None:
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await put(bus, model, request_id)
    await stage.fail(await next_job(stage, inbox), Fenced("late"))
    assert await read_log(bus, request_id) == []
    # Whoever holds the log now finishes the request; if it died too, the message comes again.
    await (await asyncio.wait_for(inbox.next(), 5)).ack()


async def test_a_request_that_has_ended_is_not_claimed(
    bus: Bus, model: str, request_id: str
) -> None:
    accepted, _ = await accept(bus, model, request_id)
    await put(bus, model, request_id)
    await end_request(bus, request_id, 1, Cancelled("no more"), [])
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    assert await stage.claim(await next_job(stage, inbox, accepted)) is None
    await assert_nothing_more(inbox)
    assert await request_queue.queued_request(bus, accepted.place) is None


async def test_a_new_task_of_an_ended_request_is_not_claimed_by_a_stage_without_an_output(
    bus: Bus, model: str, request_id: str
) -> None:
    """It appends nothing, so nothing would be refused, and it would forward the task."""
    accepted, _ = await accept(bus, model, request_id)
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await put(bus, model, request_id)
    late = msgspec.structs.replace(accepted, accepted_ms=bus.now_ms())
    job = await next_job(stage, inbox, late)
    await end_request(bus, request_id, 1, Cancelled("no more"), [])
    assert await stage.claim(job) is None
    await assert_nothing_more(inbox)
    assert await request_queue.queued_request(bus, accepted.place) is None


async def test_a_request_that_ends_before_its_first_tokens_is_settled_by_the_first_append(
    bus: Bus, model: str, request_id: str
) -> None:
    """The writer of a text does not read the log, and the server refuses records after the end."""
    accepted, _ = await accept(bus, model, request_id)
    inbox, stage = await consume(bus, "engine", model), make_stage(bus, name="engine")
    await put(bus, model, request_id, stage="engine")
    late = msgspec.structs.replace(accepted, accepted_ms=bus.now_ms())
    job = await next_job(stage, inbox, late)
    await end_request(bus, request_id, 1, Cancelled("no more"), [])
    log = await stage.claim(job)
    assert log is not None
    with pytest.raises(Fenced) as fenced:
        await log.tokens([ChoiceDelta(0, 0, [1], "a")])
    await stage.fail(job, fenced.value)
    (record,) = await read_log(bus, request_id)
    assert isinstance(record, Failure)
    await assert_nothing_more(inbox)
    assert inbox.num_in_flight == 0
    assert await request_queue.queued_request(bus, accepted.place) is None


async def test_a_request_in_flight_at_two_deaths_is_poison(
    bus: Bus, model: str, request_id: str
) -> None:
    """The workers of this test have never had a heartbeat: they count as dead at once."""
    await put(bus, model, request_id)
    inbox = await consume(bus, "renderer", model)
    for worker in ("renderer-one", "renderer-two"):
        stage = make_stage(bus, worker)
        job = await next_job(stage, inbox)
        assert await stage.claim(job) is not None
        job.delivery.abandon()
    stage = make_stage(bus, "renderer-three")
    job = await next_job(stage, inbox)
    with pytest.raises(Poisoned) as caught:
        await stage.claim(job)
    await stage.fail(job, caught.value)
    (record,) = await read_log(bus, request_id)
    assert isinstance(record, Failure)
    assert record.error.code == "poison"
    letter = await dead_letter(bus, request_id)
    assert letter is not None
    assert [attempt.worker for attempt in letter.history] == ["renderer-one", "renderer-two"]


async def two_suspects(bus: Bus, model: str) -> Consumer:
    """A worker has died with two requests in flight, and only one of them can be at fault."""
    inbox = await consume(bus, "renderer", model, ack_wait_s=2.0)
    first = make_stage(bus, "renderer-one")
    for number in range(2):
        await put(bus, model, f"{number}-{model}")
        job = await next_job(first, inbox)
        await first.claim(job)
        job.delivery.abandon()
    return inbox


async def test_suspects_are_taken_one_at_a_time(bus: Bus, model: str) -> None:
    inbox = await two_suspects(bus, model)
    second = make_stage(bus, "renderer-two")
    suspect = await next_job(second, inbox)
    assert await second.claim(suspect) is not None
    other = await next_job(second, inbox)
    assert await second.claim(other) is None
    assert [a.worker for a in await attempts(bus, str(other.request_id))] == ["renderer-one"]
    await second.finish(suspect)
    other = await next_job(second, inbox)
    assert await second.claim(other) is not None
    await second.finish(other)


async def test_a_suspect_that_waits_lets_others_have_their_turn(bus: Bus, model: str) -> None:
    inbox = await two_suspects(bus, model)
    second = make_stage(bus, "renderer-two")
    waiting = await next_job(second, inbox)
    assert await second.claim(waiting) is not None
    waiting.suspect = False  # it waits for something
    other = await next_job(second, inbox)
    assert await second.claim(other) is not None
    assert not second.claims.may_begin(waiting)
    await second.finish(other)
    assert second.claims.may_begin(waiting)
    await second.finish(waiting)


async def test_suspects_wait_for_requests_that_had_progress_before_their_worker_died(
    bus: Bus, model: str
) -> None:
    """Such a request may have killed the worker too, and would end the suspects with it."""
    inbox = await consume(bus, "renderer", model, ack_wait_s=2.0)
    first, second = make_stage(bus, "renderer-one"), make_stage(bus, "renderer-two")
    for number in range(3):
        await put(bus, model, f"{number}-{model}")
        job = await next_job(first, inbox)
        log = await first.claim(job)
        assert log is not None
        if number > 0:
            await log.step(0, 1, 2)
        job.delivery.abandon()
    jobs = {job.request_id: job for job in [await next_job(second, inbox) for _ in range(3)]}
    stuck, *resumed = [jobs[f"{number}-{model}"] for number in range(3)]
    for job in resumed:
        assert await second.claim(job) is not None
    assert await second.claim(stuck) is None
    for job in resumed:
        job.suspect = False  # it has progress
    stuck = await next_job(second, inbox)
    assert await second.claim(stuck) is not None
    # Nor does such a request begin at the same time as a suspect.
    assert not second.claims.may_begin(resumed[0])
    for job in (stuck, *resumed):
        await second.finish(job)


async def test_another_delivery_of_a_running_job_replaces_the_old_one(
    bus: Bus, model: str, request_id: str
) -> None:
    await put(bus, model, request_id)
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    job = await next_job(stage, inbox)
    assert await stage.claim(job) is not None
    first = job.delivery
    assert stage.receive(await asyncio.wait_for(inbox.next(), 5)) is None
    assert job.delivery is not first
    await stage.finish(job)
    await assert_nothing_more(inbox)
    assert inbox.num_in_flight == 0


async def test_a_request_that_cannot_be_acknowledged_leaves_its_job(
    bus: Bus, model: str, request_id: str
) -> None:
    """Otherwise no worker would acknowledge the request before its deadline."""
    await put(bus, model, request_id)
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    await stage.finish(
        await next_job(stage, inbox, RequestTicket(0.0, 0.0, 1, "pm.nobody.listens"))
    )
    again = await asyncio.wait_for(inbox.next(), 5)
    assert again.attempt == 2
    await again.ack()


async def test_handing_back_is_no_fault(bus: Bus, model: str, request_id: str) -> None:
    await put(bus, model, request_id)
    inbox, stage = await consume(bus, "renderer", model), make_stage(bus)
    for attempt in range(1, 8):
        job = await next_job(stage, inbox)
        assert job.delivery.attempt == attempt
        assert await stage.claim(job) is not None
        await stage.requeue(job)
    await (await asyncio.wait_for(inbox.next(), 5)).ack()


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_drain_finishes_running_jobs_and_requeues_the_rest(
    bus: Bus, model: str, hurried: bool
) -> None:
    inbox, shutdown, stage = await consume(bus, "renderer", model), Shutdown(), make_stage(bus)
    quick, slow = f"q-{model}", f"s-{model}"
    await put(bus, model, quick)
    await put(bus, model, slow)
    begun: list[Delivery] = []
    finished: list[str | None] = []

    async def handle(delivery: Delivery) -> None:
        job = stage.receive(delivery)
        assert job is not None
        begun.append(delivery)
        if len(begun) == 2:
            shutdown.signal()
            if hurried:
                asyncio.get_running_loop().call_later(2.0, shutdown.signal)
        try:
            await asyncio.sleep(0.2 if job.request_id == quick else 60)
        except asyncio.CancelledError:
            await stage.requeue(job)
            raise
        await stage.finish(job)
        finished.append(job.request_id)

    await asyncio.wait_for(serve(inbox, handle, shutdown, drain_s=30 if hurried else 2.0), 20)
    assert finished == [quick]
    other = await consume(bus, "renderer", model)
    again = await asyncio.wait_for(other.next(), 5)
    assert (subjects.last_token(again.subject), again.attempt) == (slow, 2)
    await again.ack()


async def test_an_unknown_receipt_does_not_hold_the_job_forever(
    bus: Bus, model: str, request_id: str
) -> None:
    """As after a leader was cut off: its delivery is unknown; the request has left its queue."""
    stage = make_stage(bus)
    inbox = await consume(bus, "renderer", model, ack_wait_s=30)
    accepted, _ = await accept(bus, model, request_id)
    assert await bus.acknowledge(accepted.receipt)
    parts = accepted.receipt.split(".")
    # …<deliveries>.<sequence in the stream>.<in the consumer>.<time>.<pending>
    parts[-4], parts[-3] = str(10**9), str(10**9)
    await put(bus, model, request_id)
    job = await next_job(stage, inbox, msgspec.structs.replace(accepted, receipt=".".join(parts)))
    assert await stage.claim(job) is not None
    await end_request(bus, request_id, 1, Cancelled("no"), [])
    await stage.finish(job)
    assert inbox.num_in_flight == 0
    queue = subjects.stage_consumer("renderer", model, "interactive")
    backlog = await bus.figures.depth(subjects.STAGES_STREAM, queue)
    assert (backlog.num_pending, backlog.num_in_flight) == (0, 0)


@pytest.fixture
async def blobs(bus: Bus) -> AsyncIterator[Blobs]:
    opened = Blobs(bus, "renderer", "renderer-test", BlobsConfig(arena_mib=1))
    await opened.start()
    yield opened
    await opened.close()


def put_payload(blobs: Blobs) -> BlobRef:
    ref = blobs.put(secrets.token_hex(32), [b"payload"], 60)
    assert ref is not None
    return ref


async def test_payloads_of_a_job_end_with_its_acknowledgement_and_not_before(
    bus: Bus, model: str, request_id: str, blobs: Blobs
) -> None:
    stage = make_stage(bus)
    stage.blobs = blobs
    inbox = await consume(bus, "renderer", model)
    await put(bus, model, request_id)
    ref = put_payload(blobs)
    accepted = RequestTicket(bus.now_ms() + 60_000, 0.0, 1, "")
    for settle in ("hand back", "fail", "hand over"):
        job = await next_job(stage, inbox, accepted)
        job.inputs = [ref]
        assert blobs.load()["arena_pinned"] == 1
        match settle:
            case "hand back":
                await stage.requeue(job)
            case "fail":
                await stage.fail(job, RuntimeError("this time"))
            case _:
                await stage.forward(job, RENDERED)
    assert blobs.load()["arena_pinned"] == 0


async def test_payloads_that_were_not_handed_over_are_taken_back(
    bus: Bus, model: str, request_id: str, blobs: Blobs
) -> None:
    stage = make_stage(bus)
    stage.blobs = blobs
    inbox = await consume(bus, "renderer", model)
    await put(bus, model, request_id)
    accepted = RequestTicket(0.0, 0.0, 1, "")
    first = await next_job(stage, inbox, accepted)
    first.outputs = [put_payload(blobs)]
    await publish(first, stage, RENDERED)
    await stage.discard_outputs(first)
    first.delivery.abandon()
    assert blobs.load()["arena_pinned"] == 1, "its message is on its way"
    again = await next_job(stage, inbox, accepted)
    again.outputs = [put_payload(blobs)]
    await stage.forward(again, AGAIN)
    await stage.discard_outputs(again)
    assert blobs.load()["arena_pinned"] == 1, "only what the first has handed over"


async def test_a_payload_is_released_before_its_task_even_if_its_owner_is_away_for_a_moment(
    bus: Bus, model: str, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies after its acknowledgement leaves no reference to the payload."""
    stage = make_stage(bus)
    stage.blobs = reader = Blobs(bus, "renderer", "renderer-test", BlobsConfig(arena_mib=1))
    # As after a restart of the broker, which has lost all heartbeats: this one is yet to return.
    owner = Blobs(bus, "renderer", f"owner-{request_id}", BlobsConfig(arena_mib=1))
    inbox = await consume(bus, "renderer", model, ack_wait_s=10)
    await put(bus, model, request_id)
    job = await next_job(stage, inbox, RequestTicket(bus.now_ms() + 60_000, 0.0, 1, ""))
    job.inputs = [put_payload(owner)]
    refused, request = asyncio.Event(), bus.request

    async def ask(*args: Any) -> bytes:
        try:
            return await request(*args)
        except Unavailable:
            refused.set()
            raise

    monkeypatch.setattr(bus, "request", ask)
    async with asyncio.timeout(10):
        settling = asyncio.create_task(stage.forward(job, RENDERED))
        await refused.wait()
        await owner.start()
        await settling
    await reader.close()
    pinned = owner.load()["arena_pinned"]
    await owner.close()
    assert inbox.num_in_flight == 0
    assert pinned == 0


async def test_a_task_that_is_published_again_is_not_mistaken_for_the_previous_one(
    bus: Bus, model: str, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(bus)
    inbox, outbox = [await consume(bus, role, model) for role in ("renderer", "engine")]
    await put(bus, model, request_id)
    job = await next_job(stage, inbox, RequestTicket(0.0, 0.0, 1, ""))
    await publish(job, stage, RENDERED)
    in_the_way = await asyncio.wait_for(outbox.next(), 5)
    with pytest.raises(Unavailable):
        await publish(job, stage, AGAIN, 1)
    last = bus.read_last

    async def too_late(*args: str) -> StoredMessage | None:
        await in_the_way.ack()
        return await last(*args)

    monkeypatch.setattr(bus, "read_last", too_late)
    await publish(job, stage, AGAIN, 1)
    again = await asyncio.wait_for(outbox.next(), 5)
    assert tasks.decode(again.data, EngineBody)[0].body == AGAIN
    await again.ack()
    await publish(job, stage, AGAIN, 1)
    await assert_nothing_more(outbox)


async def test_a_task_that_is_published_again_is_not_settled_with_the_lost_one(
    bus: Bus, model: str, request_id: str
) -> None:
    stage = make_stage(bus)
    inbox = await consume(bus, "renderer", model)
    await put(bus, model, request_id)
    lost = await next_job(stage, inbox, RequestTicket(0.0, 0.0, 1, ""))
    assert await stage.claim(lost) is not None
    other = await consume(bus, "renderer", model)
    async with asyncio.timeout(10):
        # Another worker gets the message meanwhile, and settles it.
        await (await other.next()).ack()
        await other.stop()
        await put(bus, model, request_id, b"made again")
        again = await inbox.next()
        while again.data != b"made again":
            assert stage.receive(again) is None
            again = await inbox.next()
        assert stage.receive(again) is None
        await stage.forward(lost, RENDERED)
        job = await next_job(stage, inbox)
        assert job.delivery.data == b"made again"
        await job.delivery.ack()


async def test_a_returned_request_is_rendered_with_its_own_settings(
    bus: Bus, model: str, request_id: str
) -> None:
    """Nothing of the request is lost with its images."""
    stage = make_stage(bus, "engine-test", "engine")
    accepted, request = await accept(bus, model, request_id)
    sampling = SamplingParams(n=2)
    header = TaskHeader(request_id, model, "interactive", accepted, sampling, adapter="tuned")
    inbox, again = [await consume(bus, role, model) for role in ("engine", "renderer")]
    subject = subjects.stage("engine", model, "interactive", request_id)
    await bus.publish(subject, b"task", f"{request_id}:{secrets.token_hex(4)}")
    job = await next_job(stage, inbox)
    job.identify(header)
    assert await stage.claim(job) is not None
    await stage.rerender(job, BlobLost("gone"))
    rendering, _ = tasks.decode((await again.next()).data, RenderBody)
    assert rendering.body.prompt.messages == decode_request(request).messages
    task_header = rendering.header
    assert (task_header.sampling, task_header.adapter, task_header.round) == (sampling, "tuned", 1)
