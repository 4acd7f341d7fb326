"""`/v1/requests/{id}`: the state of a request, its stream, and its cancellation."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import (
    InvalidRequest,
    LogTruncated,
    NotFound,
    Overloaded,
    Unavailable,
    WorkerFailure,
)
from shared.protocol.reading import RequestStatus
from shared.protocol.records import Failure, Finish, LogRecord
from shared.state import request_status
from shared.state.log_records import is_final
from workers.gateway.app import AppContext, Json, error_response
from workers.gateway.backend.active_request import ActiveRequest, find_request
from workers.gateway.backend.pools import read_pools
from workers.gateway.core.ids import read_start
from workers.gateway.core.log_answer import LOG
from workers.gateway.core.memory_budget import read_answer_size
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import EventStream
from workers.gateway.route_table import ANSWER_ERRORS, FROM, LAST_EVENT, RouteTable

ROUTES = RouteTable("Requests")
ROUTES.kinds.append(LOG)
PATH = "/v1/requests/{id}"

State = Literal["queued", "running", "finished", "failed", "cancelled"]


class TimelineEntry(Struct, frozen=True):
    """One stage of a request. Times are Unix milliseconds of the broker's clock."""

    stage: str
    worker: str
    attempt: int
    began_ms: float
    ended_ms: float | None
    """null if the request has not left this stage."""


class RequestBody(Struct, frozen=True):
    id: str
    state: State
    stage: str | None
    """The stage that the request is in, or ended in."""
    created: int
    """Unix seconds. For a request over NATS, the time at which it was read from its queue."""
    model: str
    """Empty for a request over NATS that has ended, if its attempts are no longer stored."""
    durable: bool
    records: int
    """Number of records in the request's token logs so far. Each prompt has a log."""
    attempt: int | None
    path: list[TimelineEntry]
    """The stages of the request so far."""
    now_ms: float
    """The present time, by the clock of the times in `path`."""
    waits_for: str | None = None
    """Reason why a queued request waits, such as `no engine`, `engine is starting` or `pool at
    zero`."""
    object: str = "request"
    result: Any = UNSET
    """The whole answer, as its endpoint returns it; for a request over NATS the list of its
    records."""
    error: errors.ErrorBody | UnsetType = UNSET


class Cancelling(Struct, frozen=True):
    id: str
    object: str = "request"
    cancelled: bool = True


@ROUTES.endpoint(
    "GET",
    PATH,
    "The state of a request, and its result",
    answer=RequestBody,
    refuses=(
        InvalidRequest,
        NotFound,
        Unavailable,
        LogTruncated,
        Overloaded,
        WorkerFailure,
        errors.AnswerTooLarge,
    ),
)
async def show(context: AppContext, request: Request, caller: Caller) -> Response:
    active = await find_request(context, request, caller)
    return Json(await _describe(context, request, active))


@ROUTES.endpoint(
    "GET",
    f"{PATH}/stream",
    "The answer of a request again, as events",
    chunk=Any,
    refuses=(InvalidRequest, NotFound, *ANSWER_ERRORS),
    parameters=(LAST_EVENT, FROM),
    counted=True,
)
async def stream(context: AppContext, request: Request, caller: Caller) -> Response:
    active = await find_request(context, request, caller)
    if active.is_overdue:
        await _read_last_records(active)
    start = read_start(request, active.options.num_logs)
    headers = {"x-request-id": active.request_id}
    events = active.events(active.follow_logs(), start)
    # A client that only reads a request does not cancel it by disconnecting.
    return EventStream(
        events, lambda: None, context.shutting_down, error_response, headers, numbered=True
    )


@ROUTES.endpoint(
    "DELETE",
    PATH,
    "Cancel a request, in any stage",
    answer=Cancelling,
    refuses=(InvalidRequest, NotFound, Unavailable),
    statuses=(202,),
)
async def cancel(context: AppContext, request: Request, caller: Caller) -> Response:
    active = await find_request(context, request, caller)
    await client.cancel_all(context.bus, active.parts)
    return Json(Cancelling(active.request_id), 202)


async def _read_last_records(active: ActiveRequest) -> list[LogRecord | None]:
    """Return the last record of each log.

    Raises NotFound for a request that must have ended and has no log: the log has been removed, or
    the gateway died before it published the request.
    """
    last_records = await active.last_records()
    if active.is_overdue and not any(last_records):
        raise NotFound("there is no such request, or it has been removed", field="id")
    return last_records


async def _describe(context: AppContext, request: Request, active: ActiveRequest) -> RequestBody:
    last_records = await _read_last_records(active)
    ends = [last for last in last_records if last is not None and is_final(last)]
    # The first part that has not ended.
    open_part = next(
        (part for part, last in zip(active.parts, last_records, strict=True) if last not in ends),
        active.parts[-1],
    )
    status = await request_status.find(context.bus, open_part)
    failure = next((end for end in ends if isinstance(end, Failure)), None)
    state = _state(last_records, ends, failure, status)
    result: Any = UNSET
    if state == "finished":
        num_tokens = sum(end.usage.completion_tokens for end in ends if isinstance(end, Finish))
        size = read_answer_size(active.record)
        num_bytes = size.num_bytes(num_tokens)
        refusal = replace(size.refusal(num_bytes, active.kind.budget), field="id")
        context.answer_budget.reserve(request.scope, num_bytes, refusal)
        result = await active.collect_answer(active.follow_logs(), request.scope)
    return RequestBody(
        id=active.request_id,
        state=state,
        stage=status.stage,
        created=active.record.created_s,
        model=active.record.model,
        durable=active.record.durable,
        records=sum(last.index + 1 for last in last_records if last is not None),
        attempt=status.attempt,
        path=timeline_of(status),
        now_ms=context.bus.now_ms(),
        waits_for=None
        if state != "queued"
        else status.pool or await _missing_pool(context, active.record.model, status.stage),
        result=result,
        error=UNSET
        if failure is None
        else errors.body_of(active.client_error(failure, last_records.index(failure))).error,
    )


async def _missing_pool(context: AppContext, model: str, stage: str | None) -> str | None:
    if stage is None or model not in context.config.models:
        return None
    try:
        return (await read_pools(context, model)).missing.get(stage)
    except (TimeoutError, Unavailable):
        return None


def _state(
    last_records: list[LogRecord | None],
    ends: list[LogRecord],
    failure: Failure | None,
    status: RequestStatus,
) -> State:
    if failure is not None:
        return "cancelled" if failure.error.code == "cancelled" else "failed"
    if len(ends) == len(last_records):
        return "finished"
    return "running" if any(last_records) or status.state == "running" else "queued"


def timeline_of(status: RequestStatus) -> list[TimelineEntry]:
    """Return the stages that a request has left and its present stage, ordered by time."""
    entries = [
        TimelineEntry(span.stage, span.worker, span.attempt, span.received_ms, span.sent_ms)
        for span in status.path
    ]
    until_ms = max((span.sent_ms for span in status.path), default=0.0)
    # The latest attempt at each stage after the stages in the path.
    attempts = {a.stage: a for a in status.attempts if a.began_ms >= until_ms}
    if status.state == "queued" and status.stage is not None:
        attempts.pop(status.stage, None)
    entries += [
        TimelineEntry(a.stage, a.worker, a.number, a.began_ms, None) for a in attempts.values()
    ]
    return sorted(entries, key=lambda entry: entry.began_ms)
