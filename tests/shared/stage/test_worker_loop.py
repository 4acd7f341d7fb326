"""The loop of all roles: outputs, followers, foreign bytes in logs, drains and crashes."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from ops.token_logs import read_log
from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.arrays import from_numpy
from shared.codec.envelope import TensorData
from shared.config.schema import Config, DeliveryConfig, ModelConfig, StageConfig
from shared.errors import Cancelled
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.multimodal import BlobRef, MultiModalKwargsItem, PlaceholderRange
from shared.protocol.pipeline import ANSWER, ENDS
from shared.protocol.records import ChoiceDelta, Failure, Finish, OutputSummary, Usage
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.task_messages import (
    EngineBody,
    FollowBody,
    RequestTicket,
    SpeechBody,
    Task,
    TaskBody,
    TaskHeader,
)
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import BATCH_AT_ONCE, Done, Outcome, WorkerLoop
from shared.state import output_ends
from shared.state.token_log import LogWriter, end_request
from tests.accepted import consume_requests, next_request
from tests.support.waiting import until

SPEECH = {
    "role": "engine",
    "inputs": {"tokens": {"from": "engine", "function": "follow", "mode": "stream"}},
    "output": {"name": "speech", "kind": "audio"},
}
TALKER = {
    **SPEECH,
    "inputs": {"text": {"from": "engine", "function": ANSWER, "mode": "stream"}},
}
OUTPUTS = ["text", "speech"]
DELTA = [ChoiceDelta(0, 0, [1], "a", finish_reason="stop")]
SUMMARY = OutputSummary(Usage(1, 1), 1)

Handle = Callable[[Task[Any], list[TensorData], Job], Awaitable[Outcome]]


def make_context(bus: Bus, model: str, stage: str, speech: Any = SPEECH) -> Context:
    stages = msgspec.convert({"speech": speech}, dict[str, StageConfig])
    delivery = DeliveryConfig(ack_wait_s=1.0, retry_delay_s=0.1, drain_s=5.0)
    config = Config({model: ModelConfig("nowhere", stages=stages)}, delivery=delivery)
    worker = f"{stage}-{secrets.token_hex(4)}"
    return Context("engine", worker, model, config, bus, structlog.get_logger(), stage)


@contextlib.asynccontextmanager
async def serving(
    bus: Bus,
    model: str,
    stage: str,
    body: type[TaskBody],
    handle: Handle,
    capacity: int = 4,
    speech: Any = SPEECH,
) -> AsyncIterator[Context]:
    context = make_context(bus, model, stage, speech)
    loop = WorkerLoop(context)
    await loop.add_stage([model], capacity, body, handle)
    running = asyncio.create_task(loop.run())
    try:
        yield context
    finally:
        context.shutdown.signal()
        await running


async def write_text(_: Task[Any], __: list[TensorData], job: Job) -> Outcome:
    assert job.log is not None
    if not job.log.records:
        await job.log.tokens(DELTA)
    return Done(SUMMARY)


async def write_speech(_: Task[Any], __: list[TensorData], job: Job) -> Outcome:
    assert job.log is not None
    await job.log.media("audio/wav", 0, data="AAAA")
    return Done(OutputSummary(units={"samples": 2}))


async def accept(bus: Bus, model: str, request_id: str) -> RequestTicket:
    """Take a client's request from its queue as a coordinator does, until its deadline."""
    request = to_json(GenerateRequest(model, [Message("user", "?")]))
    inbox = await consume_requests(bus)
    await bus.publish_without_id(subjects.request(model, request_id), request)
    delivery = await next_request(inbox, model)
    await delivery.retry(600)
    await inbox.stop()
    deadline_ms = bus.now_ms() + 60_000
    return RequestTicket(bus.now_ms(), deadline_ms, delivery.sequence, delivery.receipt)


async def put(
    bus: Bus,
    stage: str,
    header: TaskHeader,
    body: TaskBody | None = None,
    tensors: Sequence[TensorData] = (),
) -> None:
    assert header.ticket is not None
    task = Task(header, EngineBody([1], []) if body is None else body)
    msg_id = subjects.stage_msg_id(stage, header.request_id, header.ticket.place, header.round)
    subject = subjects.stage(stage, header.model, header.lane, header.request_id)
    await bus.publish(subject, envelope.encode(task, tensors), msg_id)


async def is_queued(bus: Bus, request_id: str) -> bool:
    work = subjects.stages_of(request_id)
    return await bus.read_last(subjects.STAGES_STREAM, work) is not None


async def settled(bus: Bus, header: TaskHeader) -> None:
    """Wait until neither the request nor a task of it is in a queue."""
    assert header.ticket is not None
    ticket = header.ticket

    async def is_gone() -> bool:
        if await is_queued(bus, header.request_id):
            return False
        return await request_queue.queued_request(bus, ticket.place) is None

    await until(is_gone)


@pytest.fixture
async def header(bus: Bus, model: str, request_id: str) -> TaskHeader:
    return TaskHeader(request_id, model, "interactive", await accept(bus, model, request_id))


@pytest.fixture
async def spoken(bus: Bus, header: TaskHeader) -> TaskHeader:
    """The header of a request with two outputs."""
    await output_ends.begin(bus, header.request_id, OUTPUTS)
    return msgspec.structs.replace(header, outputs=OUTPUTS)


async def test_the_stage_that_ends_the_last_output_ends_the_request(
    bus: Bus, model: str, spoken: TaskHeader
) -> None:
    async with (
        serving(bus, model, "engine", EngineBody, write_text),
        serving(bus, model, "speech", FollowBody, write_speech),
    ):
        await put(bus, "engine", spoken)
        await settled(bus, spoken)
    *_, finish = await read_log(bus, spoken.request_id)
    assert isinstance(finish, Finish)
    assert finish.usage == SUMMARY.usage
    assert finish.outputs["speech"].units == {"samples": 2}
    assert {span.stage for span in finish.path} == {"engine", "speech"}


async def test_a_new_round_does_not_wait_for_the_follower_of_the_earlier_one(
    bus: Bus, model: str, spoken: TaskHeader
) -> None:
    """The follower holds its place in the queue until the text ends, in whichever round."""
    await put(bus, "speech", spoken, FollowBody({"tokens": "text"}))
    async with serving(bus, model, "engine", EngineBody, write_text):
        await put(bus, "engine", msgspec.structs.replace(spoken, round=1))

        async def has_ended() -> bool:
            stored = await bus.read_last(
                subjects.TOKENS_STREAM, subjects.tokens(spoken.request_id, ENDS)
            )
            return stored is not None and b'"text":{' in stored.data

        await until(has_ended)
    assert await is_queued(bus, spoken.request_id)


async def test_a_new_round_starts_followers_when_its_text_is_complete(
    bus: Bus, model: str, spoken: TaskHeader
) -> None:
    log = await LogWriter.open(bus, spoken.request_id, attempt=1)
    await log.tokens(DELTA)
    async with (
        serving(bus, model, "engine", EngineBody, write_text),
        serving(bus, model, "speech", FollowBody, write_speech),
    ):
        await put(bus, "engine", msgspec.structs.replace(spoken, round=1))
        await settled(bus, spoken)
    *_, finish = await read_log(bus, spoken.request_id)
    assert isinstance(finish, Finish)


async def test_a_talker_has_the_items_of_its_prompt_and_releases_them(
    bus: Bus, model: str, spoken: TaskHeader
) -> None:
    place, ref = PlaceholderRange(0, 1), BlobRef("worker", bytes(32), 4)
    small = MultiModalKwargsItem("image", "a", place, fields={"pixels": 0})
    large = MultiModalKwargsItem("image", "b", place, blob=ref)
    tensor = from_numpy(np.arange(3))
    owned: dict[str, list[BlobRef]] = {}

    async def write(task: Task[Any], tensors: list[TensorData], job: Job) -> Outcome:
        outcome = await write_text(task, tensors, job)
        owned["engine"] = job.inputs
        return outcome

    async def speak(task: Task[Any], tensors: list[TensorData], job: Job) -> Outcome:
        assert task.body.items == [small, large]
        assert [bytes(each.data) for each in tensors] == [bytes(tensor.data)]
        owned["speech"] = [*job.inputs]
        return await write_speech(task, tensors, job)

    async with (
        serving(bus, model, "engine", EngineBody, write, speech=TALKER),
        serving(bus, model, "speech", SpeechBody, speak, speech=TALKER),
    ):
        await put(bus, "engine", spoken, EngineBody([1], [small, large]), [tensor])
        await settled(bus, spoken)
    assert owned == {"engine": [], "speech": [ref]}


async def test_an_output_that_ended_before_its_worker_died_is_noted(
    bus: Bus, model: str, spoken: TaskHeader
) -> None:
    await output_ends.add(bus, spoken.request_id, "text", SUMMARY)
    log = await LogWriter.open(bus, spoken.request_id, 1, "speech")
    await log.end(OutputSummary(units={"samples": 3}))
    # Anyone may publish on the bus.
    await bus.publish_without_id(
        subjects.append(spoken.request_id, "speech"),
        b'{"type":"media","index":1,"attempt":1,"mime":"audio/wav","offset":0}',
    )
    async with serving(bus, model, "speech", FollowBody, write_speech):
        await put(bus, "speech", spoken, FollowBody({}))
        await settled(bus, spoken)
    (finish,) = await read_log(bus, spoken.request_id)
    assert isinstance(finish, Finish)
    assert finish.outputs["speech"].units == {"samples": 3}


async def test_an_output_that_was_cut_ends_its_request(
    bus: Bus, model: str, spoken: TaskHeader
) -> None:
    """The worker that cut the outputs of the request has died before it ended the request."""
    await end_request(bus, spoken.request_id, 1, Cancelled("no more"), [])
    await bus.purge(subjects.TOKENS_STREAM, subjects.tokens(spoken.request_id))
    async with serving(bus, model, "speech", FollowBody, write_speech):
        await put(bus, "speech", spoken, FollowBody({}))
        await settled(bus, spoken)
    (failure,) = await read_log(bus, spoken.request_id)
    assert isinstance(failure, Failure)


@pytest.mark.parametrize(
    "data", [b"\xff", b'{"type":"a later kind","index":0,"attempt":1}'], ids=["bytes", "kind"]
)
@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_request_with_foreign_messages_in_its_log_leaves_its_queues(
    bus: Bus, model: str, header: TaskHeader, data: bytes, when: str
) -> None:
    async def publish_foreign() -> None:
        await bus.publish_without_id(subjects.append(header.request_id), data)

    async def handle(task: Task[Any], tensors: list[TensorData], job: Job) -> Outcome:
        if when == "during" and job.delivery.attempt == 1:
            await publish_foreign()
        return await write_text(task, tensors, job)

    if when == "before":
        await publish_foreign()
    async with serving(bus, model, "engine", EngineBody, handle):
        await put(bus, "engine", header)
        await settled(bus, header)
    *_, finish = await read_log(bus, header.request_id)
    assert isinstance(finish, Finish)


async def test_a_task_of_another_stage_that_fails_for_good_ends_all_outputs(
    bus: Bus, model: str, spoken: TaskHeader
) -> None:
    async def fail(*_: object) -> Outcome:
        raise Cancelled("no more")

    async with serving(bus, model, "engine", EngineBody, fail):
        await put(bus, "engine", spoken)
        await settled(bus, spoken)
    (failure,) = await read_log(bus, spoken.request_id)
    assert isinstance(failure, Failure)
    speech = await LogWriter.open(bus, spoken.request_id, 2, "speech")
    assert speech.closed


async def lose_device() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


async def test_a_crash_requeues_what_it_cannot_be_blamed_on(
    bus: Bus, model: str, header: TaskHeader
) -> None:
    """A running job stays claimed until its ack wait, so that its attempt has no end."""
    running = msgspec.structs.replace(header, request_id=f"{header.request_id}-running")
    began = asyncio.Semaphore(0)

    async def handle(task: Task[Any], _: list[TensorData], job: Job) -> Outcome:
        job.running = task.header.request_id == running.request_id
        began.release()
        await asyncio.sleep(60)
        raise AssertionError("not cancelled")

    context = make_context(bus, model, "engine")
    loop = WorkerLoop(context)
    await loop.add_stage([model], 4, EngineBody, handle)
    serving = asyncio.create_task(loop.run())
    for each in (header, running):
        await put(bus, "engine", each)
        await asyncio.wait_for(began.acquire(), 5)
    with structlog.testing.capture_logs() as logs:
        loop.depend_on(lose_device())
        with pytest.raises(RuntimeError, match="CUDA error"):
            await asyncio.wait_for(serving, 5)
        loop.crash(RuntimeError("once more"))
    (lost,) = [entry for entry in logs if entry["event"] == "device_lost"]
    assert lost["requests"] == [running.request_id]

    async def outcomes(request_id: str) -> list[str]:
        stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
        records = [decode_attempt(message.data) for message in stored]
        return [a.outcome for a in records if isinstance(a, AttemptRecord)]

    assert await outcomes(header.request_id) == ["open", "requeued"]
    assert await outcomes(running.request_id) == ["open"]


async def test_a_second_signal_requeues_what_still_runs(
    bus: Bus, model: str, header: TaskHeader
) -> None:
    began = asyncio.Event()

    async def handle(_: Task[Any], __: list[TensorData], job: Job) -> Outcome:
        job.running = True
        began.set()
        await asyncio.sleep(60)
        raise AssertionError("not cancelled")

    async with serving(bus, model, "engine", EngineBody, handle) as context:
        await put(bus, "engine", header)
        await asyncio.wait_for(began.wait(), 5)
        context.shutdown.signal()
    async with serving(bus, model, "engine", EngineBody, write_text):
        await settled(bus, header)
    *_, finish = await read_log(bus, header.request_id)
    assert isinstance(finish, Finish)


async def test_an_interactive_job_does_not_wait_for_claims_of_the_batch_lane(
    bus: Bus, model: str, header: TaskHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming: list[str] = []

    async def check(tenant: str, _: object) -> None:
        """Part of a claim. It does not end for jobs of the flood."""
        if tenant == "flood":
            claiming.append(tenant)
            await asyncio.Event().wait()

    num_jobs = 3 * BATCH_AT_ONCE
    async with serving(bus, model, "engine", EngineBody, write_text, num_jobs) as context:
        monkeypatch.setattr(context.quotas, "check", check)
        assert header.ticket is not None
        ticket = msgspec.structs.replace(header.ticket, tenant="flood")
        for number in range(num_jobs):
            name = f"{header.request_id}-{number}"
            job = msgspec.structs.replace(header, request_id=name, lane="batch", ticket=ticket)
            await put(bus, "engine", job)

        async def are_claimed() -> bool:
            return len(claiming) >= BATCH_AT_ONCE

        await until(are_claimed)
        await put(bus, "engine", header)
        await settled(bus, header)
        assert len(claiming) == BATCH_AT_ONCE
        # The end of the block is the second signal, which cancels the jobs of the flood.
        context.shutdown.signal()
