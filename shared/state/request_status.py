"""Where a request is: from its log, its queue, its attempts and its worker's heartbeat.

Nothing is written for this on a request's way; each of the four is looked up by the request's id.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from shared.bus.bus import Bus
from shared.bus.stored import StoredMessage
from shared.codec import envelope
from shared.errors import NotFound
from shared.protocol import subjects
from shared.protocol.messages import (
    AttemptRecord,
    Failure,
    Finish,
    Heartbeat,
    LogRecord,
    StageSpan,
    decode_attempt,
)
from shared.state.token_log import is_final, last_record

State = Literal["unknown", "queued", "in_hand", "finished", "failed"]


class _OnItsWay(msgspec.Struct, frozen=True):
    """Of a RenderTask, and of an EngineTask."""

    path: list[StageSpan]


_heartbeat = msgspec.json.Decoder(Heartbeat)
_on_its_way = msgspec.msgpack.Decoder(_OnItsWay)


@dataclass(frozen=True, slots=True)
class RequestStatus:
    request_id: str
    state: State
    stage: str | None = None
    worker: str | None = None
    attempt: int | None = None
    waits_s: float | None = None
    """In this stage so far."""
    records: int = 0
    """In its token log."""
    why: str = ""
    attempts: list[AttemptRecord] = field(default_factory=list)
    path: list[StageSpan] = field(default_factory=list)
    """The stages that it has left behind."""


async def find(bus: Bus, request_id: str) -> RequestStatus:
    last = await last_record(bus, request_id)
    attempts = [
        decode_attempt(stored.data)
        for stored in await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    ]
    records = 0 if last is None else last.index + 1
    if last is not None and is_final(last):
        return _ended(request_id, last, attempts)
    work = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    if work is None:
        why = await _why_unknown(bus)
        return RequestStatus(request_id, "unknown", records=records, attempts=attempts, why=why)
    role = subjects.role_of_stage(work.subject)
    waits_s = (bus.now_ms() - work.stored_ms) / 1000
    path = _path_of(work.data, role)
    current = next((a for a in reversed(attempts) if a.role == role), None)
    if current is None or current.outcome != "open":
        why = await _why_queued(bus, work, role)
        return RequestStatus(
            request_id, "queued", role, None, None, waits_s, records, why, attempts, path
        )
    why = await _why_in_hand(bus, current)
    return RequestStatus(
        request_id,
        "in_hand",
        role,
        current.worker,
        current.number,
        waits_s,
        records,
        why,
        attempts,
        path,
    )


def _path_of(task: bytes, role: str) -> list[StageSpan]:
    """What a stage's message says of the stages before."""
    if role == "renderer":
        return _on_its_way.decode(task).path
    return envelope.decode(task, _OnItsWay)[0].path


def _ended(request_id: str, last: LogRecord, attempts: list[AttemptRecord]) -> RequestStatus:
    records = last.index + 1
    match last:
        case Finish(path=path):
            why = "its log has its final record"
            state: State = "finished"
        case Failure(error=error, path=path):
            why = f"{error.code}: {error.message}"
            state = "failed"
        case _:
            raise AssertionError("not a final record")
    stage, worker, attempt = (
        (path[-1].role, path[-1].worker, path[-1].attempt) if path else (None, None, None)
    )
    return RequestStatus(
        request_id, state, stage, worker, attempt, None, records, why, attempts, path
    )


async def _why_unknown(bus: Bus) -> str:
    """Requests that no coordinator has taken yet cannot be told apart by their ids."""
    backlog = await bus.queue_depth(subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER)
    return (
        f"no stage has it: it is one of {backlog.num_pending} requests that wait for a coordinator,"
        " has never been asked for, or is so old that its log has been removed"
    )


async def _why_queued(bus: Bus, work: StoredMessage, role: str) -> str:
    _, _, _, model, lane, _ = work.subject.split(".")
    beats = [_heartbeat.decode(data) for data in await bus.read_heartbeats()]
    takers = [beat for beat in beats if beat.role == role and model in beat.models]
    if not takers:
        return f"no {role} for model {model} is alive"
    try:
        backlog = await bus.queue_depth(
            subjects.STAGES_STREAM, subjects.stage_consumer(role, model, lane)
        )
    except NotFound as error:
        return error.message
    if work.sequence > backlog.last_delivered:
        return (
            f"waits for one of {len(takers)} {role}s: {backlog.num_pending} are queued,"
            f" {backlog.num_in_flight} in hand"
        )
    return "was given back, or its worker has died: it comes again after its pause or ack wait"


async def _why_in_hand(bus: Bus, attempt: AttemptRecord) -> str:
    beat = next(
        (
            beat
            for data in await bus.read_heartbeats()
            if (beat := _heartbeat.decode(data)).worker == attempt.worker
        ),
        None,
    )
    if beat is None:
        return f"{attempt.worker} is dead: the request goes to another worker after its ack wait"
    load = beat.load
    if load.get("waiting"):
        return (
            f"{attempt.worker} runs {load['running']:.0f} sequences, {load['waiting']:.0f} wait:"
            f" {load['free_blocks']:.0f} of {load['blocks']:.0f} KV blocks are free"
        )
    return f"{attempt.worker} works on it"
