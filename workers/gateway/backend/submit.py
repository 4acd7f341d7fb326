"""Life of a request at a gateway: record it, publish it, follow its token logs, and answer it.

The record and the logs are all the state of an answer, so another gateway can continue it when this
one dies.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from typing import Any

from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import (
    DeadlineExceeded,
    DecodeError,
    DiskFull,
    Overloaded,
    PagemillError,
    QuotaExceeded,
    Unavailable,
)
from shared.protocol import names
from shared.protocol.encoding import to_json
from shared.protocol.messages import RequestRecord
from shared.protocol.records import AnyRecord, LogRecord
from shared.protocol.requests import GenerateRequest
from shared.protocol.text_length import check_text_len
from shared.protocol.traces import trace_headers
from shared.state import request_registry
from shared.tenants.storage_quotas import LOG_STREAMS
from workers.gateway.app import AppContext, Json, error_response
from workers.gateway.backend.active_request import MAX_OPEN_LOGS, ActiveRequest
from workers.gateway.backend.sound import SoundStream
from workers.gateway.backend.uploads import store_large_images
from workers.gateway.core.assembler import Options
from workers.gateway.core.ids import read_request_id, read_start, wants_event_ids
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.memory_budget import answer_size_of, read_answer_size, stored_options
from workers.gateway.core.plan import Delivery, SubmitPlan
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import ErrorResponder, EventStream, LineStream, run_until_disconnect

LARGE_BYTES = 2**16
"""The texts of larger bodies are checked before they are published."""
# Fields that are newer than the digest, with their defaults. A request without them has the same
# digest at a gateway that does not know them, as in a rolling upgrade.
_NEWER_FIELDS = {"on_late": "fail", "image": None, "video": None}


async def submit(
    context: AppContext,
    request: Request,
    caller: Caller,
    kind: AnswerKind[Options],
    plan: SubmitPlan[Options],
    *,
    refuse: ErrorResponder | None = None,
    stream: type[EventStream] = EventStream,
) -> Response:
    """Publish a request and answer it from its logs.

    A request with the name of an earlier one gets the answer of the earlier one. `refuse` makes the
    responses for errors, and `stream` the response with server-sent events.
    """
    start = read_start(request, plan.options.num_logs)
    active, requests = await _register(context, request, caller, kind, plan)
    logs = await _open_logs(context, active, requests, plan, is_named=_is_named(request))
    return await _respond(
        context, request, active, logs, start, refuse or error_response, plan.delivery, stream
    )


async def accept(
    context: AppContext,
    request: Request,
    caller: Caller,
    kind: AnswerKind[Options],
    plan: SubmitPlan[Options],
) -> ActiveRequest:
    """Publish a durable request whose client does not wait for its answer.

    A request with the name of an earlier one is not published again. Raises Overloaded, Unavailable
    or DiskFull, and the other errors of `submit`.
    """
    active, requests = await _register(context, request, caller, kind, plan)
    assert active.registration is not None
    await active.registration
    for part in await _missing_parts(context, active, is_named=_is_named(request)):
        try:
            await client.publish_request(
                context.bus, requests[part], active.parts[part], trace=active.trace
            )
        except PagemillError:
            active.withdraw()
            raise
    return active


def _is_named(request: Request) -> bool:
    """Return whether the client has chosen the id of a registered request."""
    is_named: bool = request.scope["request_id"][1]
    return is_named


async def _register(
    context: AppContext,
    request: Request,
    caller: Caller,
    kind: AnswerKind[Options],
    plan: SubmitPlan[Options],
) -> tuple[ActiveRequest, list[GenerateRequest]]:
    """Check and record a request, and return it with its parts for the bus.

    The record of a request without a name is stored while its parts are published.
    """
    if context.shutting_down.is_set():
        raise Unavailable("the gateway is shutting down")
    model = plan.requests[0].model
    context.check_model(model)
    if context.lane is not None:
        parts = [structs.replace(part, lane=context.lane) for part in plan.requests]
        plan = structs.replace(plan, requests=parts)
    request_id, is_named = read_request_id(request, kind)
    if not is_named:
        await context.room.check()
        await context.quotas.check(caller.tenant, LOG_STREAMS)
    if request.scope.get("body_bytes", 0) > LARGE_BYTES:
        await _check_text_lens(context, kind, plan)
    record = await _record_of(context, kind, caller, plan)
    record = structs.replace(record, trace=trace_headers(request.headers.items()) or UNSET)
    if plan.delivery is Delivery.WHOLE:
        await _reserve_answer(context, request, kind, plan, record)
    requests = await asyncio.gather(
        *(store_large_images(context, part, caller.tenant) for part in plan.requests)
    )
    # Parts that wait for others, and options that are only in memory, refer to the body until the
    # end of the answer.
    if len(requests) <= MAX_OPEN_LOGS and not plan.unrecorded:
        context.bodies.release(request)
    bus_id = names.scoped_id(request_id, caller.tenant)
    if is_named:
        record = structs.replace(record, digest=_digest(requests, plan))
    holder = f"{context.worker}:{secrets.token_hex(8)}"
    to_store = record if is_named or plan.durable else _without(record, plan.unrecorded)
    registration = asyncio.create_task(
        request_registry.register(context.bus, bus_id, to_store, holder)
    )
    # Its exception is raised before the first record is sent. If there is no record, asyncio must
    # not report the exception as never retrieved.
    registration.add_done_callback(lambda done: done.cancelled() or done.exception())
    stored_record = await registration if is_named else record
    scope = request.scope
    try:
        active = ActiveRequest(context, request_id, stored_record, scope, holder, registration)
    except DecodeError as error:
        raise Unavailable(error.message, field="X-Request-Id") from error
    if (stored_record.kind, stored_record.digest) != (record.kind, record.digest):
        active.on_disconnect()  # This client does not read the request, but another one may.
        raise errors.ReusedId(
            "this id belongs to an earlier request with different content", field="X-Request-Id"
        )
    return active, requests


async def _check_text_lens(
    context: AppContext, kind: AnswerKind[Options], plan: SubmitPlan[Options]
) -> None:
    """Raise RequestFailed for a text that is too long for the model, before the broker stores it.

    If no renderer returns the limit of the model, the text is not checked here.
    """
    with contextlib.suppress(Unavailable):
        max_len = (await context.model_card(plan.requests[0].model)).max_model_len
        for number, part in enumerate(plan.requests):
            with kind.fields_of(plan.options, number).translated(checks=True):
                check_text_len(part, max_len)


async def _record_of(
    context: AppContext, kind: AnswerKind[Options], caller: Caller, plan: SubmitPlan[Options]
) -> RequestRecord:
    """Return a new record. Raises Unavailable if no renderer returns the length of embeddings."""
    first, hidden_size = plan.requests[0], 0
    if first.embedding is not None:
        hidden_size = (await context.model_card(first.model)).hidden_size
    timeout_s = first.timeout_s or context.config.delivery.default_timeout_s
    defaults = context.config.models[first.model].sampling_defaults
    options = stored_options(plan.options, answer_size_of(plan, defaults, hidden_size))
    return RequestRecord(
        kind.name, first.model, caller.tenant, context.now_s, plan.durable, options, timeout_s
    )


def _without(record: RequestRecord, names: Set[str]) -> RequestRecord:
    options = {name: value for name, value in record.options.items() if name not in names}
    return structs.replace(record, options=options)


async def _reserve_answer(
    context: AppContext,
    request: Request,
    kind: AnswerKind[Options],
    plan: SubmitPlan[Options],
    record: RequestRecord,
) -> None:
    """Reserve memory for the whole answer.

    Raises AnswerTooLarge or Overloaded, and Unavailable if no renderer returns the model's limit.
    """
    size = read_answer_size(record)
    max_len = (
        (await context.model_card(record.model)).max_model_len if size.needs_max_model_len else 0
    )
    num_bytes = size.max_bytes(max_len)
    refusal = size.refusal(num_bytes, kind.budget)
    field = kind.fields_of(plan.options).name_of(refusal.field)
    context.answer_budget.reserve(request.scope, num_bytes, structs.replace(refusal, field=field))


def _digest(requests: Sequence[GenerateRequest], plan: SubmitPlan[Options]) -> str:
    """Return the digest of the content of a request, without the options of its delivery."""
    contents = [_content_of(request) for request in requests]
    content = [contents, plan.sampling, plan.options.digest_part()]
    return hashlib.sha256(to_json(content)).hexdigest()


def _content_of(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields of a request that are part of its digest."""
    return {
        name: value
        for name, value in structs.asdict(request).items()
        if value is not UNSET and (name, value) not in _NEWER_FIELDS.items()
    }


async def _publish(
    context: AppContext,
    active: ActiveRequest,
    part: int,
    request: GenerateRequest,
    sampling: dict[str, Any],
) -> AsyncGenerator[LogRecord, None]:
    """Publish one part and yield its log.

    This generator lives as long as the answer, so it must not refer to the received body. A part
    that waits for others to end gets the time that the whole request has left.
    """
    if part >= MAX_OPEN_LOGS:
        if active.rest_s <= 0:
            raise DeadlineExceeded("the request did not end before its deadline")
        request = structs.replace(request, timeout_s=active.rest_s)
    # A request with its text given has no sampling parameters. It is refused with empty ones, too.
    name, trace = active.parts[part], active.trace
    records = client.ask(context.bus, request, name, sampling or None, trace=trace)
    with active.kind.fields_of(active.options, part).translated(checks=True):
        async for record in records:
            yield record


async def _once_recorded(
    active: ActiveRequest, log: AsyncGenerator[AnyRecord, None]
) -> AsyncGenerator[AnyRecord, None]:
    """Yield a log as soon as the request's record is stored.

    Without a record the answer could not be resumed, so no event of it may be sent.
    """
    assert active.registration is not None
    async for record in log:
        try:
            await asyncio.shield(active.registration)  # Usually done long before.
        except PagemillError:
            # The client gets a retryable error. If it retries, the work would be done twice.
            active.start_cancel()
            raise
        yield record


async def _open_logs(
    context: AppContext,
    active: ActiveRequest,
    requests: Sequence[GenerateRequest],
    plan: SubmitPlan[Options],
    *,
    is_named: bool,
) -> list[AsyncGenerator[AnyRecord, None]]:
    """Return the logs of the answer, and publish the parts that have no log yet."""
    logs = active.follow_logs()
    for part in await _missing_parts(context, active, is_named=is_named):
        logs[part] = _publish(context, active, part, requests[part], plan.sampling)
    return [_once_recorded(active, log) for log in logs]


async def _missing_parts(
    context: AppContext, active: ActiveRequest, *, is_named: bool
) -> list[int]:
    """Return the numbers of the parts that have no log yet. Raises DiskFull and QuotaExceeded.

    A named request may have been sent before. Its parts with a log are only followed, but a part
    without one may never have been published.
    """
    last_records: Sequence[LogRecord | None] = [None] * len(active.parts)
    if is_named:
        last_records = await active.last_records()
    if is_named and None in last_records:
        # A client that asks again for a complete answer is not refused. A refusal is not stored, so
        # that the client may send the same name later.
        try:
            await context.room.check()
            await context.quotas.check(active.record.tenant, LOG_STREAMS)
        except (DiskFull, QuotaExceeded):
            active.withdraw()
            raise
    return [part for part, last in enumerate(last_records) if last is None]


async def _respond(
    context: AppContext,
    request: Request,
    active: ActiveRequest,
    logs: Sequence[AsyncGenerator[AnyRecord, None]],
    start: Sequence[int],
    refuse: ErrorResponder,
    delivery: Delivery,
    stream: type[EventStream],
) -> Response:
    headers, on_disconnect = {"x-request-id": active.request_id}, active.on_disconnect
    match delivery:
        case Delivery.SOUND:
            assert active.options.output is not None
            sound_format = active.options.output.format
            return SoundStream(context, active, logs, sound_format, on_disconnect)
        case Delivery.LINES:
            active.has_event_ids, active.encode = False, LineStream.encode
            events = active.events(logs, start)
            return LineStream(events, on_disconnect, context.shutting_down, refuse, headers)
        case Delivery.EVENTS:
            active.has_event_ids = numbered = wants_event_ids(request, active.record)
            events = active.events(logs, start)
            return stream(
                events, on_disconnect, context.shutting_down, refuse, headers, numbered=numbered
            )
        case Delivery.WHOLE:
            return await _respond_whole(context, request, active, logs, refuse, headers)


async def _respond_whole(
    context: AppContext,
    request: Request,
    active: ActiveRequest,
    logs: Sequence[AsyncGenerator[AnyRecord, None]],
    refuse: ErrorResponder,
    headers: Mapping[str, str],
) -> Response:
    try:
        answer = await run_until_disconnect(
            request.receive,
            active.collect_answer(logs, request.scope),
            active.on_disconnect,
            context.shutting_down,
        )
    except (errors.RequestFailed, errors.Interrupted) as error:
        refusal = refuse(error)
        refusal.headers.update(headers)
        return refusal
    except (errors.AnswerTooLarge, Overloaded):
        active.on_disconnect()  # The rest of an answer that is too large is not read.
        raise
    return Json(answer, headers=dict(headers))
