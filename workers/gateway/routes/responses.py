"""`/v1/responses`: responses, which agents carry out and the broker stores."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import (
    ContextTooLong,
    InvalidRequest,
    LogTruncated,
    NotFound,
    Overloaded,
    PagemillError,
    ToolFailure,
    ToolsUnavailable,
    Unavailable,
    WorkerFailure,
)
from shared.protocol.encoding import to_json
from shared.protocol.items import ImageCallItem, Item, ListToolsItem, OutputItem
from shared.protocol.renderer_rpc import TokenizeRequest
from shared.protocol.steps import Begun, PaintTool
from shared.protocol.traces import trace_headers
from shared.responses.conversation import Entry, check_outputs, entries_of, messages_of
from shared.responses.state import state_of
from shared.responses.turns import turn_request
from shared.state.step_log import StepLog
from workers.gateway.app import AppContext, Json, error_response
from workers.gateway.backend import approvals, response_stream, responses
from workers.gateway.backend.responses import FirstTurn
from workers.gateway.backend.uploads import name_files, store_images, store_large_item_media
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import EventStream, run_until_disconnect
from workers.gateway.openai.response_images import (
    check_writes_text,
    images_to_edit,
    paint_tools_of,
    painter_of,
    writes_text,
)
from workers.gateway.openai.response_object import without_images
from workers.gateway.openai.response_tools import functions_of
from workers.gateway.openai.responses import (
    RESPONSE_FIELDS,
    asks_at_once,
    begun_of,
    input_of,
    needs_card,
)
from workers.gateway.route_table import (
    ANSWER_ERRORS,
    ID_PARAMETERS,
    LAST_EVENT,
    RENDERER_ERRORS,
    Parameter,
    RouteTable,
)
from workers.gateway.schemas.responses import (
    RESPONSE_UNSUPPORTED,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseBody,
    ResponseEvent,
    ResponseFields,
    ResponseRequest,
)

PATH = "/v1/responses/{id}"
MAX_PAGE = 100
IMAGES = "message.input_image.image_url"
AFTER_EVENT = Parameter(
    "starting_after", "query", "Number of the last event that was read", Annotated[int, Meta(ge=0)]
)
STREAM = Parameter("stream", "query", "Whether to send the events", bool)
PAGE = (
    Parameter("limit", "query", f"1 to {MAX_PAGE}, by default 20", Annotated[int, Meta(ge=1)]),
    Parameter("order", "query", "`desc`, the default, or `asc`"),
    Parameter("after", "query", "Id of the last item of the page before"),
    Parameter("include[]", "query", f"`{IMAGES}`: include the URLs or the data of images"),
)
# Agents publish the first turn of a longer conversation. They load only a few at a time.
MAX_BYTES_BEFORE = 256 * 2**10
ROUTES = RouteTable("Responses")


class ResponseStream(EventStream):
    """The events of a response. Each has its type and its number, and there is no event [DONE]."""

    end = b""


def encode_event(event: ResponseEvent) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (
        event.type.encode(),
        event.sequence_number,
        to_json(event),
    )


@ROUTES.endpoint(
    "POST",
    "/v1/responses",
    "Respond to text, images and the results of functions; stored, and continued by its id",
    answer=ResponseBody,
    body=ResponseRequest,
    chunk=ResponseEvent,
    refuses=(
        *ANSWER_ERRORS,
        ContextTooLong,
        Overloaded,
        errors.ApprovalUsed,
        ToolFailure,
        ToolsUnavailable,
        errors.StoreFull,
        errors.UnknownPreviousResponse,
    ),
    parameters=ID_PARAMETERS,
    counted=True,
)
async def create(context: AppContext, request: Request, caller: Caller) -> Response:
    response_id, is_named = responses.new_response_id(request, caller.tenant)
    request.scope["request_id"] = response_id, is_named
    body = await context.bodies.decode(request, ResponseRequest, RESPONSE_UNSUPPORTED)
    context.check_model(body.model)
    log = await _begin(context, request, caller, body, (response_id, is_named))
    context.bodies.release(request)
    is_streamed, is_in_background = body.stream, body.background
    del body  # Its memory is released, because the response may take long.
    headers = {"x-request-id": response_id}
    if is_streamed:
        return ResponseStream(
            _encoded(context, log, -1, is_new=True),
            lambda: _leave(context, log),
            context.shutting_down,
            error_response,
            headers,
            numbered=True,
        )
    if is_in_background:
        return Json(await responses.show(context, log), headers=headers)
    await run_until_disconnect(
        request.receive,
        response_stream.wait_for_end(context, log),
        lambda: _leave(context, log),
        context.shutting_down,
    )
    _check_failure(log)
    return Json(await responses.show(context, log), headers=headers)


async def _begin(
    context: AppContext,
    request: Request,
    caller: Caller,
    body: ResponseRequest,
    identity: tuple[str, bool],
) -> StepLog:
    """Begin a response. Only its log remains in memory after that."""
    (response_id, is_named), tenant = identity, caller.tenant
    stored = await responses.find_references(context, request, caller, body.input)
    ignores = context.bodies.ignores_unknown
    items = input_of(body.input, response_id, stored, ignores_unknown=ignores)
    items = await name_files(context, items, tenant)
    before, logs = await responses.find_context(context, request, caller, body.previous_response_id)
    check_outputs([*before.items, *items])
    painter = await _painter_of(context, body, before.items, items, tenant)
    card = None
    if needs_card(body, [*before.items, *items]) and writes_text(body.model, context.pipelines):
        card = await context.model_card(body.model)
    now_s, config = context.now_s, context.config.agent
    begun = begun_of(body, tenant, now_s, items, before, card, config, painter)
    begun = replace(begun, input=await store_large_item_media(context, items, tenant))
    trace = trace_headers(request.headers.items())
    begun = replace(begun, lane=context.lane or begun.lane, trace=trace)
    await responses.check_room(context, tenant)
    approved_calls = await approvals.decide(context.bus, caller, items, logs, response_id)
    begun = replace(begun, approved=approved_calls)
    begun = replace(begun, asks=asks_at_once(begun))
    # A response with a name may have begun before, with a different request.
    first = None if is_named else _first_turn(begun, logs, response_id)
    return await responses.begin(context, begun, response_id, first, is_named=is_named)


async def _painter_of(
    context: AppContext,
    body: ResponseRequest,
    before: Sequence[Item],
    items: Sequence[Item],
    tenant: str,
) -> PaintTool | None:
    """Return the tool that paints images, after storing the images that it edits."""
    painter = painter_of(body, items, context.pipelines)
    if painter is None:
        return None
    images = images_to_edit(body, before, items, context.pipelines)
    return replace(painter, input_images=await store_images(context, images, tenant))


def _first_turn(begun: Begun, logs: Sequence[StepLog], response_id: str) -> FirstTurn | None:
    """Return the request for the first turn; None if an agent must publish it, or if the response
    does not begin with a turn."""
    if not begun.asks or sum(log.num_bytes for log in logs) > MAX_BYTES_BEFORE:
        return None
    state = state_of(response_id, [begun])
    entries = [entry for log in logs for entry in entries_of(log.state)]
    request, sampling, _ = turn_request(state, state.turns[0], entries + entries_of(state))
    return FirstTurn(request, sampling)


async def _encoded(
    context: AppContext, log: StepLog, after: int, *, is_new: bool = False
) -> AsyncIterator[bytes]:
    """Yield the events after number `after`. An error after the first event is sent as an event."""
    number, new_log = -1, log if is_new else None
    try:
        async for event in response_stream.events_of(context, log.tenant, log.response_id, new_log):
            number = event.sequence_number
            if number > after:
                yield encode_event(event)
    except PagemillError as error:
        if number < 0:
            raise
        body = errors.body_of(errors.info_of(error)).error
        data = {"type": "error", "sequence_number": number + 1, "code": body.code}
        data |= {"message": body.message, "param": body.param}
        yield b"event: error\ndata: %b\n\n" % to_json(data)


def _leave(context: AppContext, log: StepLog) -> None:
    """Cancel a response after its client has disconnected, unless it runs in the background."""
    begun = log.state.begun
    if begun is not None and not begun.background:
        context.background.start(responses.cancel_response(context, log))


def _check_failure(log: StepLog) -> None:
    """Raises RequestFailed for a response that failed before it had any output."""
    error = None if log.state.ended is None else log.state.ended.error
    if error is not None and not any(map(_has_content, log.state.output)):
        raise errors.RequestFailed(RESPONSE_FIELDS.translate(error), "")


def _has_content(item: OutputItem) -> bool:
    is_unpainted = isinstance(item, ImageCallItem) and item.result is None
    return not (isinstance(item, ListToolsItem) or is_unpainted)


@ROUTES.endpoint(
    "GET",
    PATH,
    "A response, or its events again",
    answer=ResponseBody,
    chunk=ResponseEvent,
    refuses=(InvalidRequest, NotFound, Unavailable, LogTruncated, WorkerFailure),
    parameters=(STREAM, AFTER_EVENT, LAST_EVENT),
)
async def retrieve(context: AppContext, request: Request, caller: Caller) -> Response:
    is_streamed = request.query_params.get("stream") in ("true", "1")
    # A broken stream may be resumed even if the response is not stored.
    response_id = request.path_params["id"]
    log = await responses.find_response(context, caller, response_id, also_unstored=is_streamed)
    if not is_streamed:
        return Json(await responses.show(context, log))
    after = _number(request, "starting_after", request.headers.get("last-event-id"))
    return ResponseStream(
        _encoded(context, log, after),
        lambda: None,  # A client that only reads does not cancel.
        context.shutting_down,
        error_response,
        {"x-request-id": log.response_id},
        numbered=True,
    )


def _number(request: Request, name: str, default: str | None) -> int:
    value = request.query_params.get(name, default)
    if value is None:
        return -1
    if not value.isdecimal() or len(value) > 15:
        raise InvalidRequest(f"{name} must be a number of at most 15 digits", field=name)
    return int(value)


@ROUTES.endpoint(
    "DELETE",
    PATH,
    "Delete a response, which is cancelled first if it has not ended",
    answer=DeletedResponse,
    refuses=(NotFound, Unavailable),
)
async def delete(context: AppContext, request: Request, caller: Caller) -> Response:
    response_id = request.path_params["id"]
    log = await responses.find_response(context, caller, response_id, also_unstored=True)
    await responses.delete_response(context, log)
    return Json(DeletedResponse(log.response_id))


@ROUTES.endpoint(
    "POST",
    f"{PATH}/cancel",
    "Cancel a response, also while clients read it",
    answer=ResponseBody,
    refuses=(NotFound, Unavailable),
)
async def cancel(context: AppContext, request: Request, caller: Caller) -> Response:
    log = await responses.find_response(context, caller, request.path_params["id"])
    await responses.cancel_response(context, log)
    return Json(await responses.show(context, log))


@ROUTES.endpoint(
    "GET",
    f"{PATH}/input_items",
    "The input of a response",
    answer=ItemList,
    refuses=(InvalidRequest, NotFound, Unavailable),
    parameters=PAGE,
)
async def list_input_items(context: AppContext, request: Request, caller: Caller) -> Response:
    log = await responses.find_response(context, caller, request.path_params["id"])
    assert log.state.begun is not None
    items, query = list(log.state.begun.input), request.query_params
    limit = _number(request, "limit", "20")
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit must be 1 to {MAX_PAGE}", field="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise InvalidRequest("after is not the id of an item of this response", field="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    if IMAGES not in query.getlist("include[]") + query.getlist("include"):
        page = [without_images(item) for item in page]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return Json(ItemList(page, first, last, len(items) > limit))


@ROUTES.endpoint(
    "POST",
    "/v1/responses/input_tokens",
    "Count the tokens of a prompt",
    answer=InputTokens,
    body=ResponseFields,
    refuses=(*RENDERER_ERRORS, errors.UnknownPreviousResponse),
    counted=True,
)
async def count_tokens(context: AppContext, request: Request, caller: Caller) -> Response:
    body = await context.bodies.decode(request, ResponseFields, RESPONSE_UNSUPPORTED)
    check_writes_text(body.model, context.pipelines)
    card = await context.model_card(body.model)
    _, logs = await responses.find_context(context, request, caller, body.previous_response_id)
    entries = [entry for log in logs for entry in entries_of(log.state)]
    stored = await responses.find_references(context, request, caller, body.input)
    ignores = context.bodies.ignores_unknown
    items = input_of(body.input, "", stored, ignores_unknown=ignores)
    items = await name_files(context, items, caller.tenant)
    entries += [Entry(item) for item in items]
    messages = messages_of(body.instructions, entries, takes_tools=card.takes_tools)
    shows_tools = card.takes_tools and body.tool_choice != "none"
    tools = [*functions_of(body), *paint_tools_of(body, context.pipelines)]
    question = TokenizeRequest(messages, tools=tools if shows_tools else [])
    with RESPONSE_FIELDS.translated():
        reply = await client.tokenize(context.bus, body.model, question, tenant=caller.tenant)
        return Json(InputTokens(reply.count))
