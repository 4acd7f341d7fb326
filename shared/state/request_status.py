"""Status of a request, read from its log, its queue, its attempts and its worker's heartbeat.

Workers store nothing else for this purpose. All of these are found by the request's id.
"""

from typing import Literal

import msgspec
from msgspec.structs import replace

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.codec import envelope
from shared.errors import DecodeError, InvalidRequest, NotFound
from shared.protocol import names, subjects
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.reading import Attempt, Outcome, RequestStatus
from shared.protocol.records import Failure, Finish, StageSpan
from shared.protocol.task_messages import TaskHeader
from shared.state import request_registry
from shared.state.log_reader import GRACE_S
from shared.state.scale_state import find_pool
from shared.state.token_log import last_record

# Keys in the load of an engine that the explanation of a busy engine needs.
ENGINE_LOAD = {"running", "free_blocks", "blocks"}


class _AnyTask(msgspec.Struct, frozen=True):
    """Task of any stage."""

    header: TaskHeader


async def find(bus: Bus, request_id: str) -> RequestStatus:
    """Return the status of a request. Raises InvalidRequest for an invalid id, and Unavailable."""
    if not names.is_task_id(request_id):
        raise InvalidRequest(f"a request id {names.NAME_RULE}", field="request_id")
    last = await last_record(bus, request_id)
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    decoded = (decode_attempt(message.data) for message in stored)
    records = [attempt for attempt in decoded if attempt is not None]
    num_records = 0 if last is None else last.index + 1
    status = RequestStatus(request_id, "unknown", records=num_records)
    if isinstance(last, Finish | Failure):
        return _ended(status, last, records)
    work = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    if work is None:
        # The request may have ended between the two reads.
        last = await last_record(bus, request_id)
        if isinstance(last, Finish | Failure):
            return _ended(replace(status, records=last.index + 1), last, records)
        return await _not_in_a_stage(bus, replace(status, attempts=_attempts(records, [], "open")))
    stage, _, _ = subjects.parts_of_stage(work.subject)
    waits_s = (bus.now_ms() - work.stored_ms) / 1000
    path = _path_of(work.data)
    attempts = _attempts(records, path, "open")
    status = replace(status, stage=stage, waits_s=waits_s, path=path, attempts=attempts)
    current = next((a for a in reversed(attempts) if a.stage == stage), None)
    if current is None or current.outcome != "open":
        status = replace(status, state="queued", why=await _why_queued(bus, work))
        return await _with_pool(bus, status, work)
    return replace(
        status,
        state="running",
        worker=current.worker,
        attempt=current.number,
        why=await _why_running(bus, current),
    )


def _attempts(
    records: list[AttemptRecord], path: list[StageSpan], latest: Literal["open", "ended"]
) -> list[Attempt]:
    """Return the attempts of a request.

    An attempt has one record when it begins and one when it ends. `latest` is the outcome of a
    stage's last attempt if this attempt has only the first record.
    """
    # The second record of an attempt replaces the first one.
    merged = {(r.stage, r.worker, r.number, r.began_ms): r for r in records}
    left = {(span.stage, span.worker, span.attempt) for span in path}
    last_of_stage = {record.stage: key for key, record in merged.items()}
    attempts = []
    for key, record in merged.items():
        outcome: Outcome = record.outcome
        if outcome == "open":
            outcome = latest if last_of_stage[record.stage] == key else "superseded"
            if (record.stage, record.worker, record.number) in left:
                outcome = "done"
        attempts.append(Attempt(*key, record.log_len, outcome))
    return attempts


def _path_of(task: bytes) -> list[StageSpan]:
    """Return the previous stages of a task; none if the task cannot be decoded."""
    try:
        return envelope.decode(task, _AnyTask)[0].header.path
    except DecodeError:
        return []


def _ended(
    status: RequestStatus, last: Finish | Failure, records: list[AttemptRecord]
) -> RequestStatus:
    attempts = _attempts(records, last.path, "ended")
    status = replace(status, state="finished", path=last.path, attempts=attempts)
    status = replace(status, why="its log has its final record")
    if isinstance(last, Failure):
        why = f"{last.error.code}: {last.error.message}"
        status = replace(status, state="failed", why=why, error_code=last.error.code)
    if not last.path:
        return status
    end = last.path[-1]
    return replace(status, stage=end.stage, worker=end.worker, attempt=end.attempt)


async def _not_in_a_stage(bus: Bus, status: RequestStatus) -> RequestStatus:
    """Return the status of a request without a task or an end."""
    record = await request_registry.find(bus, status.request_id)
    if record is not None and record.num_parts > 1:
        first, last = (names.part_id(status.request_id, part) for part in (0, record.num_parts - 1))
        why = f"its {record.num_parts} prompts are separate requests: {first} to {last}"
        return replace(status, why=why)
    if record is not None and bus.now_ms() < 1000 * (record.created_s + record.timeout_s + GRACE_S):
        why = "a gateway has recorded it, and no coordinator has accepted it yet"
        return replace(status, state="queued", why=why)
    # Requests that wait for a coordinator are counted, because they cannot be read by id.
    try:
        num_pending, _ = await request_queue.depth(bus)
    except NotFound:
        num_unread, _ = await request_queue.size(bus)
        why = f"no stage has it, no coordinator has ever run here, and {num_unread} requests wait"
        return replace(status, num_unread=num_unread, why=why)
    why = (
        "it has never been asked for, or is so old that its log has been removed"
        if num_pending == 0
        else f"no stage has it: it is one of {num_pending} requests that wait for a"
        " coordinator, has never been asked for, or is so old that its log has been removed"
    )
    if names.TENANT_MARK not in status.request_id:
        why += "; the id of a tenant's request is <id>@<tenant>"
    return replace(status, num_unread=num_pending, why=why)


async def _with_pool(bus: Bus, status: RequestStatus, work: StoredMessage) -> RequestStatus:
    """Add the state of the stage's pool, if an autoscaler leads and the pool has no worker."""
    stage, model, _ = subjects.parts_of_stage(work.subject)
    pool = await find_pool(bus, stage, model)
    if pool is None or pool[1].running:
        return status
    name, state = pool[0], pool[1].state
    return replace(status, why=f"{status.why}; pool {name} is {state}", pool=f"pool {state}")


async def _why_queued(bus: Bus, work: StoredMessage) -> str:
    stage, model, lane = subjects.parts_of_stage(work.subject)
    beats = await bus.heartbeats.read()
    workers = [
        beat for beat in beats if (beat.stage or beat.role) == stage and model in beat.models
    ]
    if not workers:
        why = f"no worker of stage {stage} for model {model} is alive"
        for report in await bus.heartbeats.read_starts():
            if (report.stage or report.role) == stage and report.model in ("", model):
                return f"{why}; {report.worker} is starting: {report.step}"
        return why
    slot = subjects.slot_of_stage(work.subject)
    try:
        depth = await bus.figures.depth(
            subjects.STAGES_STREAM, subjects.stage_consumer(stage, model, lane, slot)
        )
    except NotFound as error:
        return error.message
    if work.sequence > depth.last_delivered:
        return (
            f"waits for one of {len(workers)} workers of stage {stage}: {depth.num_pending} tasks"
            f" are queued, {depth.num_in_flight} in flight"
        )
    return "was requeued, or its worker has died: it is delivered again after its pause or ack wait"


async def _why_running(bus: Bus, attempt: Attempt) -> str:
    beats = await bus.heartbeats.read()
    beat = next((beat for beat in beats if beat.worker == attempt.worker), None)
    if beat is None:
        return f"{attempt.worker} is dead: another worker gets the request after its ack wait"
    load = beat.load
    if load.get("waiting") and load.keys() >= ENGINE_LOAD:
        return (
            f"{attempt.worker} runs {load['running']:.0f} sequences, {load['waiting']:.0f} wait:"
            f" {load['free_blocks']:.0f} of {load['blocks']:.0f} KV blocks are free"
        )
    if num := load.get("without_input"):
        return f"{attempt.worker} works on it: {num:.0f} of its speeches wait for more of a text"
    return f"{attempt.worker} works on it"
