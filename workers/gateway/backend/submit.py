"""A request on its way: noted, published, its log followed, and answered from it.

The note and the log are all that there is of an answer. Whoever has both can go on with it, so
another gateway does where this one has died.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import structlog
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import Cancelled, NotFound, PagemillError, Unavailable
from shared.protocol import subjects
from shared.protocol.messages import (
    ErrorInfo,
    Failure,
    Finish,
    GenerateRequest,
    LogRecord,
    RequestRecord,
    TokenChunk,
    to_json,
)
from shared.state import request_registry
from shared.state.token_log import last_record
from workers.gateway.app import AppContext, Json, answer_of
from workers.gateway.backend.merge import merged
from workers.gateway.backend.uploads import pinned
from workers.gateway.core.assembler import (
    AbortableAssembler,
    Events,
    MultiEventAssembler,
    PromptAssembler,
    token_ids_to_decode,
)
from workers.gateway.core.field_names import translate_error, translated_errors
from workers.gateway.core.ids import (
    PREFIXES,
    format_event_id,
    named_request_id,
    part_ids,
    read_request_id,
    read_start,
    wants_event_ids,
)
from workers.gateway.core.memory_budget import logprob_size_of, read_logprob_size, with_logprob_size
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import ErrorResponder, EventStream, event, run_until_disconnect

# Options that may differ when a client comes back for the same answer.
_OF_STREAMS = frozenset({"stream", "include_usage", "continuous_usage", "prompt_tokens"})

_log = structlog.get_logger()


class ActiveRequest:
    """One request, being answered here."""

    def __init__(
        self,
        door: AppContext,
        request_id: str,
        record: RequestRecord,
        endpoint: str,
        holder: str = "",
        noted: "asyncio.Task[RequestRecord] | None" = None,
    ) -> None:
        """`holder`: of `jobs.hold`, for a client whose leaving ends the request; `noted` is when
        that is known to all."""
        self.request_id = request_id
        self.record = record
        self.noted = noted
        self._holder = holder
        self.parts = part_ids(request_id, record)
        self.numbered = True
        """Whether events have ids."""
        self._door = door
        self._began_s = time.monotonic()
        self._tokens = door.metrics.counter("http_tokens_total", endpoint=endpoint)
        self._first = door.metrics.histogram("http_time_to_first_token_seconds", endpoint=endpoint)
        spelling = door.token_bytes.of(record.model)
        self._assembler = door.assemblers[record.kind](request_id, record, spelling)
        self._max_events = 1
        """Of one record, which has so many numbers for them."""
        if isinstance(self._assembler, MultiEventAssembler):
            self._max_events = self._assembler.max_events

    async def events(
        self, logs: Sequence[AsyncIterator[LogRecord]], start: Sequence[int]
    ) -> AsyncIterator[bytes]:
        """One for every record from `start` on that has something to show. Raises Failed."""
        self._assembler.collects_answer = False
        position = [-1] * len(logs)
        async for part, record in merged(logs):
            position[part] = record.index * self._max_events
            shown = await self._take(part, record, self._event_id(position), start[part])
            for one in shown if isinstance(shown, Events) else [shown]:
                if one is not None and position[part] >= start[part]:
                    yield event(errors.to_json(one), self._event_id(position))
                position[part] += 1
            position[part] = (record.index + 1) * self._max_events - 1

    async def whole(self, logs: Sequence[AsyncIterator[LogRecord]]) -> Any:
        """The answer. Raises Failed."""
        async for part, record in merged(logs):
            await self._take(part, record, "", 0)
        return self._assembler.answer()

    async def _take(self, part: int, record: LogRecord, event_id: str, start: int) -> Any | None:
        match record:
            case TokenChunk():
                if record.index == 0 and start == 0:
                    self._first.observe(time.monotonic() - self._began_s)
                self._tokens.add(sum(len(delta.token_ids) for delta in record.choices))
                model, tenant = self.record.model, self.record.tenant
                await self._door.token_bytes.learn(model, self._unspelt(record), tenant)
                return self._assembler.add(part, record)
            case Finish():
                return self._assembler.finish(part, record.usage)
            case Failure():
                if record.error.code == Cancelled.code and isinstance(
                    self._assembler, AbortableAssembler
                ):
                    return self._assembler.abort()
                if record.index * self._max_events < start:
                    return None
                self.cancel_soon()  # The others, if there are any.
                raise errors.RequestFailed(self.error_of(record), event_id)

    def error_of(self, failure: Failure) -> ErrorInfo:
        """With the field by the name that its endpoint has for it."""
        return translate_error(failure.error, self.record.kind, self.record.options)

    def _unspelt(self, record: TokenChunk) -> set[int]:
        token_ids = token_ids_to_decode(record)
        if record.index == 0 and isinstance(self._assembler, PromptAssembler):
            token_ids.update(self._assembler.prompt_token_ids)
        return token_ids

    def follow(self) -> list[AsyncIterator[LogRecord]]:
        """To their ends, or to when these must have been there."""
        rest_s = max(0.0, self._rest_s)
        return [client.follow(self._door.bus, part, timeout_s=rest_s) for part in self.parts]

    @property
    def overdue(self) -> bool:
        """It must have ended, if it was ever taken."""
        return self._rest_s < -client.GRACE_S

    @property
    def _rest_s(self) -> float:
        since_s = self._door.bus.now_ms() / 1000 - self.record.created_s
        return self.record.timeout_s - since_s

    def cancel_soon(self) -> None:
        self._door.in_background(self._cancel())

    def gone(self) -> None:
        """The client is."""
        if not self.record.durable:
            self._door.in_background(self._leave())

    async def _leave(self) -> None:
        """A connection may be found broken long after its client has gone on over another."""
        assert self.noted is not None
        try:
            await self.noted
            alone = await request_registry.unregister(self._door.bus, self.request_id, self._holder)
        except PagemillError:
            alone = True  # Nobody else can have come.
        if alone:
            await self._cancel()

    async def _cancel(self) -> None:
        try:
            for part in self.parts:
                await client.cancel(self._door.bus, part)
        except Unavailable as error:
            _log.warning("not_cancelled", request_id=self.request_id, reason=error.message)

    def _event_id(self, position: Sequence[int]) -> str:
        return format_event_id(position) if self.numbered else ""


async def submit(
    door: AppContext,
    request: Request,
    caller: Caller,
    kind: Any,
    order: SubmitPlan,
    *,
    stream: bool,
    durable: bool,
    known_as: tuple[str, bool] | None = None,
    refuse: ErrorResponder = answer_of,
) -> Response:
    """Have a request done, and answer with what becomes of it; or go on with the answer of an
    earlier one, where the client names that.

    `known_as` is what `read_request_id` has said; `refuse` says what failures are answered with.
    """
    if door.shutting_down.is_set():
        raise Unavailable("the gateway is being stopped")
    model = order.requests[0].model
    door.check_model(model)
    request_id, named = known_as or read_request_id(request, kind, caller.tenant)
    record = _record_of(door, kind, caller, order, durable=durable)
    if not stream:
        await _make_room(door, request, record)
    start = read_start(request, order.options.get("parts", 1))
    requests = await asyncio.gather(*(pinned(door, r, caller.tenant) for r in order.requests))
    door.body_budget.release(request)
    if named:
        record = structs.replace(record, digest=_digest(requests, order))
    holder = f"{door.worker}:{secrets.token_hex(8)}"
    holding = asyncio.create_task(request_registry.register(door.bus, request_id, record, holder))
    # What becomes of it is looked at before anything is shown, or by nobody.
    holding.add_done_callback(lambda done: done.cancelled() or done.exception())
    known = await holding if named else record
    job = ActiveRequest(door, request_id, known, request.scope["endpoint_path"], holder, holding)
    if known.digest != record.digest:
        job.gone()  # Its client is, and another may still be there.
        raise errors.ReusedId(
            "this id is that of another request, which asked something else",
            field="X-Request-Id",
        )
    logs = await _logs_of(door, job, requests, order, named=named)
    return await respond(door, request, job, logs, start, stream=stream, refuse=refuse)


def _record_of(
    door: AppContext, kind: Any, caller: Caller, order: SubmitPlan, *, durable: bool
) -> RequestRecord:
    first = order.requests[0]
    created_s = int(door.bus.now_ms() / 1000)
    timeout_s = first.timeout_s or door.config.delivery.default_timeout_s
    kept = logprob_size_of(order, door.config.models[first.model].sampling_defaults)
    options = with_logprob_size(order.options, kept)
    return RequestRecord(kind, first.model, caller.tenant, created_s, durable, options, timeout_s)


async def _make_room(door: AppContext, request: Request, record: RequestRecord) -> None:
    """For all of the answer at once. Raises AnswerTooLarge or Overloaded; where the model's limit
    is needed, Unavailable."""
    kept = read_logprob_size(record)
    most = (await door.card(record.model)).max_model_len if kept.needs_max_model_len else 0
    num_bytes = kept.max_bytes(most)
    door.answer_budget.reserve(
        request.scope, num_bytes, kept.limiting_field(num_bytes, record.kind)
    )


def _digest(requests: Sequence[GenerateRequest], order: SubmitPlan) -> str:
    """Of all that the answer depends on, and not of how it is brought."""
    shape = {name: value for name, value in order.options.items() if name not in _OF_STREAMS}
    return hashlib.sha256(to_json([requests, order.sampling, shape])).hexdigest()


async def _ask(
    door: AppContext,
    job: ActiveRequest,
    part: str,
    request: GenerateRequest,
    sampling: dict[str, Any],
) -> AsyncIterator[LogRecord]:
    """It lives as long as the answer, so it has nothing of the body as it was sent."""
    assert job.noted is not None
    records = client.ask(door.bus, request, part, job.record.tenant, sampling)
    with translated_errors(job.record.kind, job.record.options):
        async for record in records:
            try:
                # By now it has been for long; nobody may see an answer that could not be resumed.
                await asyncio.shield(job.noted)
            except PagemillError:
                job.cancel_soon()  # Who is told to ask again would have it done twice.
                raise
            yield record


async def _logs_of(
    door: AppContext,
    job: ActiveRequest,
    requests: Sequence[GenerateRequest],
    order: SubmitPlan,
    *,
    named: bool,
) -> list[AsyncIterator[LogRecord]]:
    """Of a request that may have been here before, what has a log is followed; what has none may
    never have been published."""
    lasts: Sequence[LogRecord | None] = [None] * len(job.parts)
    if named:
        lasts = await asyncio.gather(*(last_record(door.bus, part) for part in job.parts))
    return [
        _ask(door, job, part, asked, order.sampling) if last is None else followed
        for part, asked, followed, last in zip(
            job.parts, requests, job.follow(), lasts, strict=True
        )
    ]


async def respond(
    door: AppContext,
    request: Request,
    job: ActiveRequest,
    logs: Sequence[AsyncIterator[LogRecord]],
    start: Sequence[int],
    *,
    stream: bool,
    refuse: ErrorResponder = answer_of,
) -> Response:
    headers = {"x-request-id": job.request_id}
    if stream:
        job.numbered = wants_event_ids(request, job.record)
        return EventStream(
            job.events(logs, start),
            job.gone,
            door.shutting_down,
            refuse,
            headers,
            numbered=job.numbered,
        )
    try:
        answer = await run_until_disconnect(
            request.receive, job.whole(logs), job.gone, door.shutting_down
        )
    except (errors.RequestFailed, errors.Interrupted) as error:
        refusal = refuse(error)
        refusal.headers.update(headers)
        return refusal
    return Json(answer, headers=headers)


async def job_of(door: AppContext, request: Request, caller: Caller) -> ActiveRequest:
    """The one that the path names, by its id or as its client has named it. Raises NotFound, also
    for other tenants' requests."""
    name = request.path_params["id"]
    of_client = [named_request_id(kind, caller.tenant, name) for kind in PREFIXES]
    ids = [name, *of_client] if subjects.is_request_id(name) else of_client
    for request_id in ids:
        record = await request_registry.find(door.bus, request_id)
        if record is not None and record.tenant == caller.tenant:
            return ActiveRequest(door, request_id, record, request.scope["endpoint_path"])
    raise NotFound("there is no such request, or not any more", field="id")
