"""Versions of a coordinator's tasks: an older worker leaves those that it would misread."""

import asyncio
import secrets
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from nats.js import JetStreamContext

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.config.schema import Config, ModelConfig
from shared.errors import InvalidRequest, RequestError, UnsupportedVersion
from shared.protocol import subjects, versions
from shared.protocol.encoding import to_json
from shared.protocol.messages import AttemptRecord, DeadLetter
from shared.protocol.records import ErrorInfo, Failure
from shared.protocol.requests import EmbeddingParams, GenerateRequest, encode_request
from shared.protocol.task_messages import RenderBody
from shared.protocol.versions import VERSION_HEADER, version_header, version_of
from shared.stage import tasks
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.state import dead_letters
from tests.support.waiting import until
from workers.coordinator import worker as coordinator
from workers.coordinator.worker import Coordinator

NEWER = 99
CONFIG = Config({"demo": ModelConfig("nowhere")})
REQUEST = encode_request(GenerateRequest("demo", prompt="a"), {})


async def coordinate(bus: Bus, request_id: str, data: bytes, age_s: float, version: int) -> None:
    """Have a coordinator take a request that was stored `age_s` ago."""

    async def settle(after_s: float = 0.0) -> None:
        pass

    delivery: Any = SimpleNamespace(
        subject=subjects.request("demo", request_id),
        data=data,
        stored_ms=bus.now_ms() - 1000 * age_s,
        attempt=1,
        sequence=10**9,
        place=subjects.RequestPlace(subjects.REQUESTS_STREAM, 10**9),
        receipt="r",
        tenant="",
        msg_id=request_id,
        headers=version_header(version),
        retry=settle,
        ack=settle,
        abandon=lambda: None,
    )
    context = Context("coordinator", "coordinator-1", "", CONFIG, bus, structlog.get_logger())
    await Coordinator(context).admit_or_end(Job(delivery, bus.now_ms(), request_id))


async def publish_first_task(bus: Bus, embedding: EmbeddingParams | None) -> bytes:
    """Return the task that a coordinator makes of a request."""
    request_id = new_id()
    data = encode_request(GenerateRequest("demo", prompt="a", embedding=embedding), {})
    await coordinate(bus, request_id, data, 0, 1)
    stored = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    assert stored is not None
    return stored.data


def new_id() -> str:
    return f"r-{secrets.token_hex(8)}"


async def error_of(bus: Bus, request_id: str) -> ErrorInfo:
    (failure,) = await read_log(bus, request_id)
    assert isinstance(failure, Failure)
    return failure.error


async def test_only_embeddings_need_workers_that_know_them(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, embedding = [
        await publish_first_task(bus, embedding) for embedding in (None, EmbeddingParams())
    ]
    assert tasks.decode(embedding, RenderBody)[0].header.version == 2
    monkeypatch.setattr(versions, "WIRE_VERSION", 1)
    assert tasks.decode(text, RenderBody)[0].header.version == 1
    with pytest.raises(
        UnsupportedVersion, match="version 2, and this worker reads versions 1 to 1"
    ):
        tasks.decode(embedding, RenderBody)


async def test_a_request_of_a_newer_version_waits_for_a_newer_coordinator(bus: Bus) -> None:
    request_id = new_id()
    data = b'{"model": "demo", "later": 1, "timeout_s": 60}'
    with pytest.raises(UnsupportedVersion, match="request has version 99, and this worker reads"):
        await coordinate(bus, request_id, data, 30, NEWER)
    assert await read_log(bus, request_id) == []


@pytest.mark.parametrize("data", [b'{"later": 1, "timeout_s": 60}', b"\x81\x01\x02", b"other"])
async def test_after_its_deadline_it_ends_with_an_error_that_may_be_retried(
    bus: Bus, data: bytes
) -> None:
    request_id = new_id()
    left = AttemptRecord(
        "coordinator", "c-1", 1, 0.0, 0, "requeued", unread="this request has version 99"
    )
    await bus.publish_without_id(subjects.attempts(request_id), to_json(left))
    await coordinate(bus, request_id, data, 4000, NEWER)
    error = await error_of(bus, request_id)
    assert (error.code, error.fault, error.retryable) == ("unsupported_version", "server", True)
    assert "coordinator: this request has version 99" in error.message


async def test_a_late_request_says_which_stage_could_not_read_its_task(bus: Bus) -> None:
    request_id = new_id()
    for worker in ("engine-1", "engine-2"):
        why = "this task has version 4, and this worker reads versions 1 to 3"
        left = AttemptRecord("engine", worker, 1, 0.0, 0, "requeued", unread=why)
        await bus.publish_without_id(subjects.attempts(request_id), to_json(left))
    data = encode_request(GenerateRequest("demo", prompt="a", timeout_s=10), {})
    await coordinate(bus, request_id, data, 11, 1)
    error = await error_of(bus, request_id)
    assert error.code == "unsupported_version"
    assert error.message == (
        "not finished within 10 s of its acceptance: engine: this task has version 4, and this"
        " worker reads versions 1 to 3"
    )


async def test_a_task_that_a_newer_worker_has_taken_since_is_merely_late(bus: Bus) -> None:
    request_id = new_id()
    left = AttemptRecord("engine", "engine-1", 1, 0.0, 0, "requeued", unread="too new")
    claimed = AttemptRecord("engine", "engine-2", 2, 1.0, 0)
    for record in (left, claimed):
        await bus.publish_without_id(subjects.attempts(request_id), to_json(record))
    data = encode_request(GenerateRequest("demo", prompt="a", timeout_s=10), {})
    await coordinate(bus, request_id, data, 11, 1)
    assert (await error_of(bus, request_id)).code == "deadline_exceeded"


@pytest.mark.parametrize("version", ["", "-1", "x"])
async def test_foreign_bytes_are_the_clients_error_at_once(bus: Bus, version: str) -> None:
    with pytest.raises(RequestError):
        await coordinate(bus, new_id(), b'{"model": "demo", "prompt": "a", "later": 1}', 0, 1)
    with pytest.raises(InvalidRequest, match="must be a number"):
        version_of({VERSION_HEADER: version})


@pytest.mark.parametrize("subject", ["pm.request.demo", "pm.request.@acme.demo"])
async def test_a_queued_request_of_a_version_without_ids_in_subjects_becomes_a_dead_letter(
    own_bus: Bus, jetstream: JetStreamContext, subject: str
) -> None:
    """Its last token names no request, so it ends no log."""
    config = (await jetstream.stream_info(subjects.REQUESTS_STREAM)).config
    await jetstream.update_stream(config.evolve(subjects=[subjects.REQUESTS_FILTER]))
    await jetstream.publish(subject, REQUEST, headers={"Nats-Msg-Id": "r-1"})
    await jetstream.update_stream(config)
    context = Context("coordinator", "coordinator-1", None, CONFIG, own_bus, structlog.get_logger())
    running = asyncio.create_task(coordinator.main(context))

    async def letters() -> list[DeadLetter]:
        return [letter async for _, _, letter in dead_letters.read_newest(own_bus, 2)]

    (letter,) = await until(letters)
    assert (letter.request_id, letter.subject, letter.request) == (None, subject, REQUEST)
    assert letter.tenant == subjects.tenant_of(subject)

    async def is_settled() -> bool:
        return not (await own_bus.figures.size(subjects.REQUESTS_STREAM))[0]

    await until(is_settled)
    assert (await own_bus.figures.size(subjects.TOKENS_STREAM))[0] == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
