"""`/v1/batches`: files of requests that run as one job, with one result for each line."""

from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import (
    DiskFull,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaExceeded,
    TooManyBatches,
    Unavailable,
)
from shared.protocol.batch_orders import BatchOrder
from shared.state import batch_log
from workers.gateway.app import AppContext, Json, error_response
from workers.gateway.backend import batches
from workers.gateway.core.pages import limit_of
from workers.gateway.core.result_positions import parse_position
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import EventStream
from workers.gateway.route_table import LAST_EVENT, Parameter, RouteTable
from workers.gateway.schemas.batches import BatchBody, BatchList

ROUTES = RouteTable("Batches")
PATH = "/v1/batches"
MAX_PAGE = 100
DEFAULT_PAGE = 20
LINES = "application/jsonl"
NEXT_HEADER = "x-next-after"


@ROUTES.endpoint(
    "POST",
    PATH,
    "Run the requests of a file",
    answer=BatchBody,
    body=BatchOrder,
    refuses=(DiskFull, NotFound, Overloaded, QuotaExceeded, TooManyBatches, Unavailable),
    parameters=(
        Parameter("Idempotency-Key", "header", "A name of the batch, for a repeated request"),
    ),
    counted=True,
)
async def create(context: AppContext, request: Request, caller: Caller) -> Response:
    body = await context.bodies.decode(request, BatchOrder)
    return Json(batches.describe(await batches.begin(context, request, caller, body)))


@ROUTES.endpoint(
    "GET",
    PATH,
    "The batches of a tenant, the newest first",
    answer=BatchList,
    refuses=(InvalidRequest, NotFound, Unavailable),
    parameters=(
        Parameter("after", "query", "Id of the last batch of the page before"),
        Parameter(
            "limit",
            "query",
            f"1 to {MAX_PAGE}, by default {DEFAULT_PAGE}",
            Annotated[int, Meta(ge=1, le=MAX_PAGE)],
        ),
    ),
)
async def list_batches(context: AppContext, request: Request, caller: Caller) -> Response:
    bus, query = context.bus, request.query_params
    limit = limit_of(query, DEFAULT_PAGE, MAX_PAGE)
    orders = await batch_log.list_begun(bus, caller.tenant, limit + 1, query.get("after"))
    states = await batch_log.open_batches(bus, orders[:limit])
    data = [batches.describe(state) for state in states]
    ids = [body.id for body in data]
    first_id, last_id = (ids[0], ids[-1]) if ids else (None, None)
    return Json(
        BatchList(data=data, first_id=first_id, last_id=last_id, has_more=len(orders) > limit)
    )


@ROUTES.endpoint(
    "GET",
    f"{PATH}/{{id}}",
    "The state of a batch",
    answer=BatchBody,
    refuses=(NotFound, Unavailable),
)
async def show(context: AppContext, request: Request, caller: Caller) -> Response:
    return Json(batches.describe(await batches.find(context, caller, request.path_params["id"])))


@ROUTES.endpoint(
    "POST",
    f"{PATH}/{{id}}/cancel",
    "Cancel a batch; its finished lines keep their results",
    answer=BatchBody,
    refuses=(NotFound, Overloaded, Unavailable),
)
async def cancel(context: AppContext, request: Request, caller: Caller) -> Response:
    state = await batches.find(context, caller, request.path_params["id"])
    if state.ended is None:
        await batch_log.cancel(context.bus, state.begun)
        state = await batches.find(context, caller, state.begun.batch_id)
    return Json(batches.describe(state))


@ROUTES.endpoint(
    "GET",
    f"{PATH}/{{id}}/results",
    "Results of a batch, also while it runs: answers and errors as lines of JSON, in the order in"
    " which they ended. With `Accept: text/event-stream`, an event for each result until the batch"
    " has ended",
    answer=LINES,
    chunk=Any,
    refuses=(InvalidRequest, NotFound, Unavailable),
    parameters=(
        Parameter(
            "after",
            "query",
            "Header `X-Next-After` of the page before, or the id of an event; by default 0",
        ),
        LAST_EVENT,
    ),
)
async def results(context: AppContext, request: Request, caller: Caller) -> Response:
    last_id = request.headers.get("last-event-id")
    text, field = request.query_params.get("after", "0"), "after"
    if last_id:
        text, field = last_id, "Last-Event-ID"
    start = parse_position(text, field)
    state = await batches.find(context, caller, request.path_params["id"])
    if EventStream.media_type in request.headers.get("accept", ""):
        batch_id = state.begun.batch_id
        events = batches.result_events(context, caller, batch_id, start)
        return EventStream(
            events,
            lambda: None,  # The batch continues without its reader.
            context.shutting_down,
            error_response,
            {"x-request-id": batch_id},
            numbered=True,
        )
    lines, end, _ = await batches.read_page(context.bus, state, start)
    content = b"".join(line + b"\n" for line, _ in lines)
    return Response(content, headers={NEXT_HEADER: str(end)}, media_type=LINES)
