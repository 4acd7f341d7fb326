"""Tasks on the bus: encoding, decoding, and publishing for the stages of a pipeline."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.request_queue import QueuedRequest
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.errors import DecodeError, Unavailable
from shared.protocol import subjects
from shared.protocol.multimodal import BlobRef
from shared.protocol.pipeline import EDGE_FUNCTIONS, REQUEST, Edge, Pipeline, function_of
from shared.protocol.prompts import prompt_of
from shared.protocol.requests import Prompt, decode_request
from shared.protocol.task_messages import Task, TaskBody, TaskHeader
from shared.protocol.versions import WIRE_VERSION, check_version, needed_version
from shared.stage.edge_functions import input_of_follower
from shared.stage.slots import slot_of_task


class _AnyHeader(Struct, frozen=True):
    version: int = 1
    writer_version: int = 1


class _AnyTask(Struct, frozen=True):
    header: _AnyHeader


def decode(data: bytes, body: type[Any]) -> tuple[Task[Any], list[TensorData]]:
    """Return the task in a message, and its tensors, which are views into `data`.

    Raises DecodeError for bytes that are not a task with such a body. Raises UnsupportedVersion for
    a task of a newer version, and for an undecodable task of a newer writer.
    """
    try:
        task, tensors = envelope.decode(data, Task[body])  # type: ignore[valid-type]
    except DecodeError:
        header = envelope.decode(data, _AnyTask)[0].header
        check_version(max(header.version, header.writer_version), "this task")
        raise
    check_version(task.header.version, "this task")
    return task, tensors


def prompt_of_queued(request: QueuedRequest) -> Prompt:
    """Return the prompt of a stored request. Raises UnsupportedVersion."""
    check_version(request.version, "the request")
    return prompt_of(decode_request(request.data))


def encode(header: TaskHeader, body: TaskBody, tensors: Sequence[TensorData]) -> bytes:
    """Return the message of a task, with the version that its reader needs."""
    needed = max(needed_version(header), needed_version(body))
    header = replace(header, version=needed, writer_version=WIRE_VERSION)
    return envelope.encode(Task(header, body), tensors)


async def publish(
    bus: Bus,
    edge: Edge,
    header: TaskHeader,
    source: Any,
    tensors: Sequence[TensorData] = (),
    payloads: Sequence[BlobRef] = (),
    num_slots: int = 1,
) -> bool:
    """Publish the task of an edge's target, once for each acceptance of the request and each round.

    `source` is the argument of the edge's function, and `num_slots` the target's number of slots.
    Returns whether the stored task is this one, and now owns `payloads`. Otherwise an earlier
    attempt has stored a task with other payloads. Raises Unavailable while the target's queue still
    has the task of an earlier round.
    """
    message = _message_of(edge, header, source, tensors, num_slots)
    subject, data, msg_id = message
    round, was_there = header.round, await bus.publish(*message)
    if not was_there or edge.mode == "stream" or not (round > 0 or payloads):
        # A follower reads logs, so its task of an earlier round serves as well.
        return True
    stored = await bus.read_last(subjects.STAGES_STREAM, subject)
    if round > 0 and stored is not None and stored.msg_id != msg_id:
        raise Unavailable("the task of an earlier round is still in the queue")
    if round > 0 and stored is None:
        # The task of the earlier round may have been removed since. A duplicate is refused again.
        was_there = await bus.publish(*message)
    return not was_there or (stored is not None and stored.data == data)


def _message_of(
    edge: Edge, header: TaskHeader, source: Any, tensors: Sequence[TensorData], num_slots: int
) -> tuple[str, bytes, str]:
    """Return the subject, the content and the message id of the target's task."""
    assert header.ticket is not None
    body = function_of(edge)(source)
    slot = slot_of_task(header, body, num_slots)
    return (
        subjects.stage(edge.target, header.model, header.lane, header.request_id, slot),
        encode(header, body, tensors),
        subjects.stage_msg_id(edge.target, header.request_id, header.ticket.place, header.round),
    )


async def publish_follower(
    bus: Bus,
    pipeline: Pipeline,
    edge: Edge,
    header: TaskHeader,
    body: TaskBody | None,
    tensors: Sequence[TensorData],
) -> Struct:
    """Publish a follower's task for an output, and return its body.

    `body` and `tensors` come from the task of the output's writer.
    """
    source = input_of_follower(pipeline, edge, body)
    # The tensors belong to the items in the body, which only some functions read.
    passed = tensors if EDGE_FUNCTIONS[edge.function].takes_body else ()
    await publish(bus, edge, header, source, passed)
    result: Struct = function_of(edge)(source)
    return result


def common_payloads(result: Struct, payloads: Sequence[BlobRef]) -> list[BlobRef]:
    """Return the payloads that a stage passes on with its result."""
    passed = result.blobs() if isinstance(result, TaskBody) else []
    return [ref for ref in payloads if ref in passed]


async def stored_payloads(
    bus: Bus, edge: Edge, header: TaskHeader, source: Any, num_slots: int
) -> list[BlobRef]:
    """Return the payloads of this request's task in the target's queue.

    `source` is as in `publish`. It determines the type of the task's body.
    """
    body = function_of(edge)(source)
    slot = slot_of_task(header, body, num_slots)
    subject = subjects.stage(edge.target, header.model, header.lane, header.request_id, slot)
    stored = await bus.read_last(subjects.STAGES_STREAM, subject)
    if stored is None:
        return []
    payloads: list[BlobRef] = decode(stored.data, type(body))[0].body.blobs()
    return payloads


async def publish_item(
    bus: Bus,
    edge: Edge,
    header: TaskHeader,
    key: str,
    body: Struct,
    tensors: Sequence[TensorData],
    nonce: str = "",
) -> bool:
    """Publish the task of an item for the target of a fan-out edge.

    `header` belongs to the request that needs the item. Returns whether a task for the item was
    stored already; one task serves all requests. In each round, a request publishes a task once for
    each `nonce`.
    """
    assert header.ticket is not None
    name = subjects.item_task(key)
    item = TaskHeader(name, header.model, header.lane, expires_ms=header.ticket.deadline_ms)
    return await bus.publish(
        subjects.stage(edge.target, header.model, header.lane, name),
        encode(item, function_of(edge)(body), tensors),
        f"{key}:{header.request_id}:{header.ticket.sequence}:{header.round}:{nonce}",
    )


async def publish_first(bus: Bus, pipeline: Pipeline, header: TaskHeader, prompt: Prompt) -> None:
    """Publish the tasks of the stages that take the request itself."""
    part = pipeline.part_for(header.outputs, text_given=header.text_given)
    for edge in part.edges_from(REQUEST, "task"):
        await bus.publish(*_message_of(edge, header, prompt, (), 1))
