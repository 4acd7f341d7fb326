"""`/v1/requests/{id}`: what has become of a request; its answer once more; its end."""

import asyncio
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared import client
from shared.errors import NotFound
from shared.protocol.messages import Failure, Finish, LogRecord
from shared.state import request_status
from shared.state.token_log import is_final, last_record
from workers.gateway.app import AppContext, Json, error_response
from workers.gateway.backend.active_request import ActiveRequest, find_request
from workers.gateway.core.ids import read_start
from workers.gateway.core.memory_budget import read_logprob_size
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import EventStream
from workers.gateway.routes.timeline import TimelineEntry, timeline_of

State = Literal["queued", "running", "finished", "failed", "cancelled"]


class RequestBody(Struct, frozen=True):
    id: str
    state: State
    stage: str | None
    """Where it is, or has ended."""
    created: int
    model: str
    durable: bool
    records: int
    """In its log so far; of several prompts, all together."""
    attempt: int | None
    path: list[TimelineEntry]
    """Its way through the stages so far."""
    now_ms: float
    """By the clock that the times of the way are of."""
    object: str = "request"
    result: Any = UNSET
    error: errors.ErrorBody | UnsetType = UNSET


class Cancelling(Struct, frozen=True):
    id: str
    object: str = "request"
    cancelled: bool = True


def routes(context: AppContext) -> list[Route]:
    async def show(request: Request, caller: Caller) -> Response:
        active = await find_request(context, request, caller)
        return Json(await _described(context, request, active))

    async def stream(request: Request, caller: Caller) -> Response:
        active = await find_request(context, request, caller)
        await _check_kept(context, active)
        start = read_start(request, len(active.parts))
        # Whoever looks on may go again.
        headers = {"x-request-id": active.request_id}
        events = active.events(active.follow_logs(), start)
        return EventStream(
            events, lambda: None, context.shutting_down, error_response, headers, numbered=True
        )

    async def cancel(request: Request, caller: Caller) -> Response:
        active = await find_request(context, request, caller)
        for part in active.parts:
            await client.cancel(context.bus, part)
        return Json(Cancelling(active.request_id), 202)

    path = "/v1/requests/{id}"
    return [
        context.route(path, show),
        context.route(path, cancel, ["DELETE"]),
        context.route(f"{path}/stream", stream, counted=True),
    ]


async def _check_kept(context: AppContext, active: ActiveRequest) -> None:
    """Raises NotFound for a request that must have ended and has no log: there is none any more, or
    its gateway died before it was on its way."""
    if not active.is_overdue:
        return
    lasts = await asyncio.gather(*(last_record(context.bus, part) for part in active.parts))
    if not any(lasts):
        raise NotFound("there is no such request, or not any more", field="id")


async def _described(context: AppContext, request: Request, active: ActiveRequest) -> RequestBody:
    await _check_kept(context, active)
    lasts = await asyncio.gather(*(last_record(context.bus, part) for part in active.parts))
    ended = [last for last in lasts if last is not None and is_final(last)]
    # The one that the others wait for.
    open_part = next(
        (part for part, last in zip(active.parts, lasts, strict=True) if last not in ended),
        active.parts[-1],
    )
    where = await request_status.find(context.bus, open_part)
    failure = next((last for last in ended if isinstance(last, Failure)), None)
    state = _state(lasts, ended, failure, where)
    result: Any = UNSET
    if state == "finished":
        num_tokens = sum(last.usage.completion_tokens for last in ended if isinstance(last, Finish))
        context.answer_budget.reserve(
            request.scope, read_logprob_size(active.record).num_bytes(num_tokens), "id"
        )
        result = await active.collect_answer(active.follow_logs())
    return RequestBody(
        id=active.request_id,
        state=state,
        stage=where.stage,
        created=active.record.created_s,
        model=active.record.model,
        durable=active.record.durable,
        records=sum(last.index + 1 for last in lasts if last is not None),
        attempt=where.attempt,
        path=timeline_of(where),
        now_ms=context.bus.now_ms(),
        result=result,
        error=UNSET if failure is None else errors.body_of(active.client_error(failure)).error,
    )


def _state(
    lasts: list[LogRecord | None],
    ended: list[LogRecord],
    failure: Failure | None,
    where: request_status.RequestStatus,
) -> State:
    if failure is not None:
        return "cancelled" if failure.error.code == "cancelled" else "failed"
    if len(ended) == len(lasts):
        return "finished"
    return "running" if any(lasts) or where.state == "in_hand" else "queued"
