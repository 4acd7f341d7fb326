"""Status of a request, read from its log, its queue, its attempts and its worker's heartbeat.

Workers store nothing else for this purpose. All of these are found by the request's id.
"""

import asyncio
import contextlib
from typing import Literal

import msgspec
from msgspec.structs import replace

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.codec import envelope
from shared.errors import Cancelled, DecodeError, InvalidRequest, NotFound, Unavailable
from shared.protocol import names, subjects
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.reading import Attempt, Outcome, RequestStatus
from shared.protocol.records import Failure, Finish, LogRecord, StageSpan
from shared.protocol.task_messages import TaskHeader
from shared.state import request_registry
from shared.state.any_tenant import only_tenant
from shared.state.log_reader import GRACE_S
from shared.state.scale_state import find_pool
from shared.state.token_log import last_record

# Keys in the load of an engine that the explanation of a busy engine needs.
ENGINE_LOAD = {"running", "free_blocks", "blocks"}
COORDINATOR = "coordinator"


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
    model = next((record.model for record in records if record.model), None)
    status = RequestStatus(request_id, "unknown", model, records=_num_records(last))
    if isinstance(last, Finish | Failure):
        return _ended(status, last, records)
    work = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    if work is None:
        return await _not_in_a_stage(bus, status, records)
    stage, model, _ = subjects.parts_of_stage(work.subject)
    waits_s = (bus.now_ms() - work.stored_ms) / 1000
    path = _path_of(work.data)
    attempts = _attempts(records, path, "open")
    status = replace(
        status, model=model, stage=stage, waits_s=waits_s, path=path, attempts=attempts
    )
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


async def is_used(bus: Bus, request_id: str) -> bool:
    """Return whether an id belongs to a request, which is queued, has a task, or has a log.

    A cancellation that came before its request does not count. Raises Unavailable.
    """
    last, task, is_queued = await asyncio.gather(
        last_record(bus, request_id),
        bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id)),
        _is_queued(bus, request_id),
    )
    is_cancelled = isinstance(last, Failure) and last.error.code == Cancelled.code
    return is_queued or task is not None or not (last is None or (is_cancelled and not last.index))


async def _is_queued(bus: Bus, request_id: str) -> bool:
    """Return whether a request is queued, False if the broker does not report on its queue.

    An admitted request is found by its task or its log.
    """
    with contextlib.suppress(Unavailable):
        return bool(await request_queue.queued_models(bus, request_id))
    return False


async def find_any_tenants(bus: Bus, request_id: str) -> RequestStatus:
    """Return the status of a request; an id without a tenant is also found among all tenants.

    Raises InvalidRequest for an invalid id and for one that several tenants use, and Unavailable.
    """
    status = await find(bus, request_id)
    if status.state != "unknown" or not names.is_own_id(request_id):
        return status
    # A request with several prompts has a log for each of them.
    parts = (request_id, names.part_id(request_id, 0))
    for name in parts:
        logs = await bus.figures.subjects_of(subjects.TOKENS_STREAM, subjects.tenants_logs(name))
        ids = {subjects.id_in(log) for log in logs if subjects.is_text_log(log)}
        ids |= await request_queue.tenants_ids(bus, name)
        tenants = (names.split_id(scoped_id)[1] for scoped_id in ids)
        tenant = only_tenant(request_id, tenants, "request")
        if tenant is not None:
            return await find(bus, names.scoped_id(request_id, tenant))
    return status


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


def _num_records(last: LogRecord | None) -> int:
    return 0 if last is None else last.index + 1


async def _not_in_a_stage(
    bus: Bus, status: RequestStatus, records: list[AttemptRecord]
) -> RequestStatus:
    """Return the status of a request without a task."""
    models = await request_queue.queued_models(bus, status.request_id)
    if not models:
        # A request leaves its queue after its end. The replica that serves reads may lag.
        await bus.wait_for_replicas()
    last = await last_record(bus, status.request_id)
    status = replace(status, records=_num_records(last))
    if isinstance(last, Finish | Failure):
        return _ended(status, last, records)
    status = replace(status, attempts=_attempts(records, [], "open"))
    if models:
        beats = await bus.heartbeats.read()
        is_served = any(beat.role == COORDINATOR for beat in beats)
        why = "a coordinator is about to admit it" if is_served else "no coordinator is alive"
        return replace(status, state="queued", model=models[0], why=why)
    record = await request_registry.find(bus, status.request_id)
    if record is not None and record.num_parts > 1:
        first, end = (names.part_id(status.request_id, part) for part in (0, record.num_parts - 1))
        why = f"its {record.num_parts} prompts are separate requests: {first} to {end}"
        return replace(status, why=why)
    if record is not None and bus.now_ms() < 1000 * (record.created_s + record.timeout_s + GRACE_S):
        why = "a gateway has recorded it, and has not published it yet"
        return replace(status, state="queued", why=why)
    why = "it has never been asked for, or is so old that its log has been removed"
    return replace(status, why=why)


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
        for report in await bus.heartbeats.read_refusals():
            if report.model == model and report.stage == stage and not report.pid:
                return f"no worker of stage {stage} serves {model}: {report.refused}"
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
