"""The status of a request: read from its log, its queue, its attempts and a worker's heartbeat.

Workers write nothing for this purpose; each of the four is looked up by the request's id.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.codec import envelope
from shared.errors import DecodeError, NotFound
from shared.protocol import subjects
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.records import Failure, Finish, StageSpan
from shared.protocol.task_messages import TaskHeader
from shared.state.token_log import last_record

# What the explanation of a busy engine reads from its load; other roles report other figures.
ENGINE_LOAD = {"running", "free_blocks", "blocks"}

State = Literal["unknown", "queued", "running", "finished", "failed"]


class _AnyTask(msgspec.Struct, frozen=True):
    """A task of any stage."""

    header: TaskHeader


@dataclass(frozen=True, slots=True)
class RequestStatus:
    request_id: str
    state: State
    stage: str | None = None
    worker: str | None = None
    attempt: int | None = None
    waits_s: float | None = None
    """Time in this stage so far."""
    records: int = 0
    """Number of records in its token log."""
    why: str = ""
    attempts: list[AttemptRecord] = field(default_factory=list)
    path: list[StageSpan] = field(default_factory=list)
    """The stages behind it."""


async def find(bus: Bus, request_id: str) -> RequestStatus:
    last = await last_record(bus, request_id)
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    found = (decode_attempt(message.data) for message in stored)
    attempts = [attempt for attempt in found if attempt is not None]
    records = 0 if last is None else last.index + 1
    status = RequestStatus(request_id, "unknown", records=records, attempts=attempts)
    if isinstance(last, Finish | Failure):
        return _ended(status, last)
    work = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    if work is None:
        return replace(status, why=await _why_unknown(bus))
    stage, _, _ = subjects.parts_of_stage(work.subject)
    waits_s = (bus.now_ms() - work.stored_ms) / 1000
    status = replace(status, stage=stage, waits_s=waits_s, path=_path_of(work.data))
    current = next((a for a in reversed(attempts) if a.stage == stage), None)
    if current is None or current.outcome != "open":
        return replace(status, state="queued", why=await _why_queued(bus, work))
    return replace(
        status,
        state="running",
        worker=current.worker,
        attempt=current.number,
        why=await _why_running(bus, current),
    )


def _path_of(task: bytes) -> list[StageSpan]:
    """The stages behind a task; none if the task cannot be decoded."""
    try:
        return envelope.decode(task, _AnyTask)[0].header.path
    except DecodeError:
        return []


def _ended(status: RequestStatus, last: Finish | Failure) -> RequestStatus:
    status = replace(status, state="finished", why="its log has its final record", path=last.path)
    if isinstance(last, Failure):
        why = f"{last.error.code}: {last.error.message}"
        status = replace(status, state="failed", why=why)
    if not last.path:
        return status
    end = last.path[-1]
    return replace(status, stage=end.stage, worker=end.worker, attempt=end.attempt)


async def _why_unknown(bus: Bus) -> str:
    """Requests that wait for a coordinator are counted, because they cannot be read by id."""
    try:
        backlog = await bus.queue_depth(subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER)
    except NotFound:
        return "no stage has it, and no coordinator has ever run here"
    return (
        f"no stage has it: it is one of {backlog.num_pending} requests that wait for a coordinator,"
        " has never been asked for, or is so old that its log has been removed"
    )


async def _why_queued(bus: Bus, work: StoredMessage) -> str:
    stage, model, lane = subjects.parts_of_stage(work.subject)
    beats = await bus.read_heartbeats()
    workers = [
        beat for beat in beats if (beat.stage or beat.role) == stage and model in beat.models
    ]
    if not workers:
        return f"no worker of stage {stage} for model {model} is alive"
    try:
        depth = await bus.queue_depth(
            subjects.STAGES_STREAM, subjects.stage_consumer(stage, model, lane)
        )
    except NotFound as error:
        return error.message
    if work.sequence > depth.last_delivered:
        return (
            f"waits for one of {len(workers)} workers of stage {stage}: {depth.num_pending} tasks"
            f" are queued, {depth.num_in_flight} in flight"
        )
    return "was requeued, or its worker has died: it is delivered again after its pause or ack wait"


async def _why_running(bus: Bus, attempt: AttemptRecord) -> str:
    beats = await bus.read_heartbeats()
    beat = next((beat for beat in beats if beat.worker == attempt.worker), None)
    if beat is None:
        return f"{attempt.worker} is dead: another worker gets the request after its ack wait"
    load = beat.load
    if load.get("waiting") and load.keys() >= ENGINE_LOAD:
        return (
            f"{attempt.worker} runs {load['running']:.0f} sequences, {load['waiting']:.0f} wait:"
            f" {load['free_blocks']:.0f} of {load['blocks']:.0f} KV blocks are free"
        )
    return f"{attempt.worker} works on it"
