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
from workers.gateway.app import AppContext, Json, answer_of
from workers.gateway.backend.submit import ActiveRequest, job_of
from workers.gateway.core.ids import read_start
from workers.gateway.core.memory_budget import read_logprob_size
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import EventStream
from workers.gateway.routes.timeline import TimelineEntry, way_of

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


def routes(door: AppContext) -> list[Route]:
    async def show(request: Request, caller: Caller) -> Response:
        job = await job_of(door, request, caller)
        return Json(await _described(door, request, job))

    async def stream(request: Request, caller: Caller) -> Response:
        job = await job_of(door, request, caller)
        await _check_kept(door, job)
        start = read_start(request, len(job.parts))
        # Whoever looks on may go again.
        headers = {"x-request-id": job.request_id}
        events = job.events(job.follow(), start)
        return EventStream(
            events, lambda: None, door.shutting_down, answer_of, headers, numbered=True
        )

    async def cancel(request: Request, caller: Caller) -> Response:
        job = await job_of(door, request, caller)
        for part in job.parts:
            await client.cancel(door.bus, part)
        return Json(Cancelling(job.request_id), 202)

    path = "/v1/requests/{id}"
    return [
        door.route(path, show),
        door.route(path, cancel, ["DELETE"]),
        door.route(f"{path}/stream", stream, counted=True),
    ]


async def _check_kept(door: AppContext, job: ActiveRequest) -> None:
    """Raises NotFound for a request that must have ended and has no log: there is none any more, or
    its gateway died before it was on its way."""
    if not job.overdue:
        return
    lasts = await asyncio.gather(*(last_record(door.bus, part) for part in job.parts))
    if not any(lasts):
        raise NotFound("there is no such request, or not any more", field="id")


async def _described(door: AppContext, request: Request, job: ActiveRequest) -> RequestBody:
    await _check_kept(door, job)
    lasts = await asyncio.gather(*(last_record(door.bus, part) for part in job.parts))
    ended = [last for last in lasts if last is not None and is_final(last)]
    # The one that the others wait for.
    open_part = next(
        (part for part, last in zip(job.parts, lasts, strict=True) if last not in ended),
        job.parts[-1],
    )
    where = await request_status.find(door.bus, open_part)
    failure = next((last for last in ended if isinstance(last, Failure)), None)
    state = _state(lasts, ended, failure, where)
    result: Any = UNSET
    if state == "finished":
        num_tokens = sum(last.usage.completion_tokens for last in ended if isinstance(last, Finish))
        door.answer_budget.reserve(
            request.scope, read_logprob_size(job.record).num_bytes(num_tokens), "id"
        )
        result = await job.whole(job.follow())
    return RequestBody(
        id=job.request_id,
        state=state,
        stage=where.stage,
        created=job.record.created_s,
        model=job.record.model,
        durable=job.record.durable,
        records=sum(last.index + 1 for last in lasts if last is not None),
        attempt=where.attempt,
        path=way_of(where),
        now_ms=door.bus.now_ms(),
        result=result,
        error=UNSET if failure is None else errors.body_of(job.error_of(failure)).error,
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
