"""Messages of newer versions at this code's workers: left to a newer worker, and never given up."""

import secrets
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.protocol import subjects, versions
from shared.protocol.encoding import to_msgpack
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.records import Failure, Finish
from shared.protocol.task_messages import EngineBody, ItemResult, Task, TaskHeader
from shared.stage.job import Job
from shared.stage.worker_loop import Outcome
from shared.state import item_results
from tests.shared.stage.test_worker_loop import accept, is_queued, serving, settled, write_text
from tests.support.waiting import until

NEWER = 99
# Deliveries that an older worker would have given the request up after.
MANY = 5


class AnyTask(Struct, frozen=True):
    header: dict[str, Any]
    body: dict[str, Any]


@pytest.fixture
async def header(bus: Bus, model: str) -> TaskHeader:
    request_id = f"t-{secrets.token_hex(6)}"
    return TaskHeader(request_id, model, "interactive", await accept(bus, model, request_id))


def task_of(header: TaskHeader, **more: Any) -> bytes:
    """Return a task with further fields in its header, as another version would write it."""
    plain = msgspec.to_builtins(header, builtin_types=(bytes,)) | more
    return envelope.encode(AnyTask(plain, {"prompt_token_ids": [1], "items": []}), [])


def in_newer_envelope(header: TaskHeader) -> bytes:
    data = bytearray(task_of(header))
    data[4:6] = (envelope.VERSION + 1).to_bytes(2, "little")
    return bytes(data)


async def put(bus: Bus, header: TaskHeader, data: bytes) -> None:
    assert header.ticket is not None
    msg_id = subjects.stage_msg_id("engine", header.request_id, header.ticket.place, 0)
    subject = subjects.stage("engine", header.model, header.lane, header.request_id)
    await bus.publish(subject, data, msg_id)


async def attempts(bus: Bus, header: TaskHeader) -> list[AttemptRecord]:
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(header.request_id))
    return [attempt for m in stored if (attempt := decode_attempt(m.data)) is not None]


async def has_dead_letter(bus: Bus, header: TaskHeader) -> bool:
    letters = subjects.dead_of(header.request_id)
    return await bus.read_last(subjects.DEAD_STREAM, letters) is not None


NEW_PARAMETER = {"sampling": {"newest": 1}, "writer_version": NEWER}
UNREADABLE: dict[str, dict[str, Any]] = {
    "a version": {"version": NEWER},
    "a parameter": NEW_PARAMETER,
    "a parameter that its writer has marked": NEW_PARAMETER | {"version": NEWER},
    "another type of a field": {"outputs": {"text": {}}, "writer_version": NEWER},
}


@pytest.mark.parametrize("kind", [*UNREADABLE, "an envelope"])
async def test_messages_that_an_older_worker_cannot_read_stay_in_their_queue(
    bus: Bus, model: str, header: TaskHeader, kind: str
) -> None:
    more = UNREADABLE.get(kind)
    data = in_newer_envelope(header) if more is None else task_of(header, **more)
    async with serving(bus, model, "engine", EngineBody, write_text):
        await put(bus, header, data)

        async def was_left_often() -> bool:
            # Deliveries 1, 2, 4 and 8 are recorded.
            return max((a.number for a in await attempts(bus, header)), default=0) >= MANY

        await until(was_left_often)
    records = await attempts(bus, header)
    assert {a.outcome for a in records} == {"requeued"}
    assert all("version" in a.unread and "this worker reads" in a.unread for a in records)
    assert await is_queued(bus, header.request_id)
    assert await read_log(bus, header.request_id) == []
    assert not await has_dead_letter(bus, header)


async def test_a_newer_worker_answers_what_an_older_one_has_left_often(
    bus: Bus, model: str, header: TaskHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(bus, model, "engine", EngineBody, write_text):
        await put(bus, header, task_of(header, version=NEWER))

        async def was_left_often() -> bool:
            return max((a.number for a in await attempts(bus, header)), default=0) >= MANY

        await until(was_left_often)
        monkeypatch.setattr(versions, "WIRE_VERSION", NEWER)
        await settled(bus, header)
    assert isinstance((await read_log(bus, header.request_id))[-1], Finish)
    assert not await has_dead_letter(bus, header)


async def test_a_field_that_may_be_ignored_is_ignored(
    bus: Bus, model: str, header: TaskHeader
) -> None:
    async with serving(bus, model, "engine", EngineBody, write_text):
        await put(bus, header, task_of(header, later=[1], writer_version=NEWER))
        await settled(bus, header)
    assert isinstance((await read_log(bus, header.request_id))[-1], Finish)


@pytest.mark.parametrize(
    "more", [{"sampling": {"misspelt": 1}}, {"version": "none"}], ids=["parameter", "version"]
)
async def test_bytes_that_no_version_reads_end_at_once(
    bus: Bus, model: str, header: TaskHeader, more: dict[str, Any]
) -> None:
    async with serving(bus, model, "engine", EngineBody, write_text):
        await put(bus, header, task_of(header, **more))
        await settled(bus, header)
    (failure,) = await read_log(bus, header.request_id)
    assert isinstance(failure, Failure)
    assert failure.error.code == "undecodable_message"


async def test_a_newer_result_of_an_item_leaves_the_task_and_the_result(
    bus: Bus, model: str, header: TaskHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is older than an encoder has claimed the task before it reads the result."""
    key = secrets.token_hex(8)
    result = replace(ItemResult(data=b"embeddings"), version=NEWER)
    await bus.publish_without_id(subjects.result(key), to_msgpack(result))

    async def gather(task: Task[Any], tensors: list[TensorData], job: Job) -> Outcome:
        assert await item_results.get(bus, key) is not None
        return await write_text(task, tensors, job)

    async with serving(bus, model, "engine", EngineBody, gather):
        await put(bus, header, task_of(header))

        async def was_left() -> bool:
            return any(a.unread for a in await attempts(bus, header))

        await until(was_left)
        monkeypatch.setattr(versions, "WIRE_VERSION", NEWER)
        await settled(bus, header)
    assert isinstance((await read_log(bus, header.request_id))[-1], Finish)
