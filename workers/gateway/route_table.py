"""Declarations of endpoints, each at its handler: route, access and documentation."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared import errors as shared_errors
from shared.config.schema import Right
from shared.errors import InvalidRequest, PagemillError
from shared.protocol.records import ErrorInfo
from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.assembler import Options
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.ids import read_request_id
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.multipart import parse_form
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.body import check_form
from workers.gateway.http.body_types import converted
from workers.gateway.http.origins import SAFE_METHODS
from workers.gateway.http.sse import ErrorResponder, EventStream

T = TypeVar("T")

SCALE_OUT = "Scale-out"
"""Tag of the endpoints that `gateway.scale_out` enables."""

ErrorLike = ErrorInfo | type[PagemillError]
Errors = tuple[type[PagemillError], ...]
Handler = Callable[[AppContext, Request, Caller], Awaitable[Response]]


class Parameter(Struct, frozen=True):
    """A parameter of a request besides its body."""

    name: str
    place: str
    """`path`, `query` or `header`."""
    description: str
    type: Any = str


class ApiOperation(Struct, frozen=True):
    """One method of one path, as the OpenAPI document and the HTTP API reference describe it."""

    method: str
    path: str
    tag: str
    summary: str
    answer: Any = None
    """The type of a JSON response, or the media type of any other response."""
    body: Any = None
    """The type of the JSON body, or of the fields of a form."""
    file: str = ""
    """The field of the form that contains a file; "" if the body is JSON."""
    json_body: Any = None
    """The type of a JSON body that may be sent in place of a form with a file."""
    chunk: Any = None
    """The type of the events' data, if the response may be a stream."""
    refuses: Errors = ()
    """Errors in addition to the errors that every operation may have."""
    parameters: tuple[Parameter, ...] = ()
    statuses: tuple[int, ...] = (200,)
    """Statuses of the response."""
    public: bool = False
    """Whether no API key is needed."""
    right: Right = "requests"
    """The right that the key needs."""
    counted: bool = False
    """Whether requests count for the limits of the key."""
    name: str = ""
    """Operation id; "" for the id that is derived from the path."""
    status_of: Callable[[ErrorLike], int] = errors.status_of
    error: Any = errors.ErrorAnswer
    """The type of the body of an error."""

    @property
    def refusals(self) -> dict[int, list[str]]:
        """Error codes, by their status."""
        error_types: set[type[PagemillError]] = {
            errors.HeadersTooLarge,
            errors.ForeignHost,
            shared_errors.WorkerFailure,
            *self.refuses,
        }
        if self.method not in SAFE_METHODS:
            error_types.add(errors.ForeignOrigin)
        if not self.public:
            error_types |= {errors.InvalidKey, errors.MissingRight}
        if self.counted:
            error_types.add(errors.RateLimited)
        if self.body is not None:
            error_types |= {shared_errors.InvalidRequest, *_BODY_ERRORS}
        by_status: dict[int, list[str]] = {}
        for error in sorted(error_types, key=lambda error: error.code):
            by_status.setdefault(self.status_of(error), []).append(error.code)
        return dict(sorted(by_status.items()))


class Call:
    """An HTTP request, its caller, and the state of its gateway."""

    def __init__(
        self, context: AppContext, request: Request, caller: Caller, fields: ClientFields
    ) -> None:
        self.context = context
        self.request = request
        self.caller = caller
        self.fields = fields
        """The client's names of fields, for errors that renderers report to the planner."""

    async def read_form(
        self, body_type: type[T], unsupported: frozenset[str], file_field: str = ""
    ) -> tuple[T, list[bytes]]:
        """Return the fields of a form and the files in one field, at least one.

        Without `file_field`, the form has no files. The names of lists may end with `[]`. Raises a
        RequestError that names the wrong field.
        """
        content_type = check_form(self.request)
        body = await self.context.bodies.read(self.request)
        values, files_by_name = await asyncio.to_thread(parse_form, body, content_type)
        files: list[bytes] = []
        for name, contents in files_by_name.items():
            if name.removesuffix("[]") == file_field:
                files += contents
            elif name in unsupported:
                raise errors.UnsupportedParameter(f"{name} is not supported", field=name)
            else:
                raise InvalidRequest(f"{name} must not be a file", field=name)
        if file_field and not files:
            raise InvalidRequest(f"{file_field} is missing", field=file_field)
        ignores = self.context.bodies.ignores_unknown
        fields = _single(values)
        form = converted(fields, body_type, unsupported, ignores_unknown=ignores, strict=False)
        return form, files


def _single(values: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return one value for each field. Raises InvalidRequest for a field that occurs twice."""
    for name, texts in values.items():
        if len(texts) > 1 and not name.endswith("[]"):
            raise InvalidRequest(f"{name} is given twice", field=name)
    return {name.removesuffix("[]"): texts[0] for name, texts in values.items()}


Planner = Callable[[Call, Any], Awaitable[SubmitPlan[Options]]]
"""Returns the plan for a body. Raises PagemillError."""


def unchanged(body: Any, response: Response) -> Response:
    return response


class RouteTable:
    """The endpoints of one module."""

    def __init__(
        self,
        tag: str,
        *,
        refuse: ErrorResponder | None = None,
        stream: type[EventStream] = EventStream,
        **details: Any,
    ) -> None:
        """`refuse` makes the responses for errors, by default in the form of the client's API.
        `stream` makes the responses with events.

        `details` are fields of ApiOperation that all endpoints of the module have in common.
        """
        self.tag = tag
        self._refuse = refuse
        self._stream = stream
        self._details = details
        self._endpoints: list[tuple[ApiOperation, Handler]] = []
        self.kinds: list[AnswerKind[Any]] = []

    @property
    def operations(self) -> list[ApiOperation]:
        return [operation for operation, _ in self._endpoints]

    def endpoint(
        self, method: str, path: str, summary: str, **details: Any
    ) -> Callable[[Handler], Handler]:
        """Declare the decorated handler as an endpoint. `details` are fields of ApiOperation."""
        operation = ApiOperation(method, path, self.tag, summary, **self._details | details)

        def declare(handler: Handler) -> Handler:
            self._endpoints.append((operation, handler))
            return handler

        return declare

    def answer(
        self,
        kind: AnswerKind[Options],
        *paths: str,
        summary: str,
        body: type[Any],
        unsupported: frozenset[str] = frozenset(),
        read: Callable[[Call], Awaitable[Any]] | None = None,
        finish: Callable[[Any, Response], Response] = unchanged,
        **details: Any,
    ) -> Callable[[Planner[Options]], Planner[Options]]:
        """Declare an endpoint that answers requests. The decorated function plans them.

        `read` reads the body, by default JSON without the `unsupported` fields. `finish` changes
        the response. `details` are fields of ApiOperation.
        """
        self.kinds.append(kind)

        async def read_json(call: Call) -> Any:
            content = await call.context.bodies.decode(call.request, body, unsupported)
            if content.model:
                call.context.check_model(content.model)
            return content

        def declare(planner: Planner[Options]) -> Planner[Options]:
            async def handle(context: AppContext, request: Request, caller: Caller) -> Response:
                read_request_id(request, kind)
                call = Call(context, request, caller, kind.client_fields)
                content = await (read or read_json)(call)
                try:
                    plan = await planner(call, content)
                except PagemillError as error:
                    if not error.reported:
                        raise
                    info = call.fields.translate(errors.info_of(error))
                    raise errors.RequestFailed(info, "") from error
                response = await submit(
                    context, request, caller, kind, plan, refuse=self._refuse, stream=self._stream
                )
                return finish(content, response)

            for number, path in enumerate(paths):
                name = "_".join(["post", *re.findall(r"\w+", path)]) if number else ""
                self.endpoint("POST", path, summary, body=body, name=name, **details)(handle)
            return planner

        return declare

    def routes(self, context: AppContext) -> list[Route]:
        """Return the routes that the configuration enables."""
        if self.tag == SCALE_OUT and not context.limits.scale_out:
            return []
        return [
            context.route(
                operation.path,
                partial(handler, context),
                [operation.method],
                public=operation.public,
                counted=operation.counted,
                right=operation.right,
                refuse=self._refuse,
            )
            for operation, handler in self._endpoints
        ]


_BODY_ERRORS: Errors = (
    errors.BodyTooLarge,
    errors.RequestTimeout,
    errors.UnknownParameter,
    errors.UnsupportedParameter,
    errors.WrongContentType,
)
"""Errors that any endpoint with a body may have."""

RENDERER_ERRORS: Errors = (
    shared_errors.ContextTooLong,
    shared_errors.InvalidMedia,
    shared_errors.MediaBlocked,
    shared_errors.MediaNotFound,
    shared_errors.MediaTooLarge,
    shared_errors.Overloaded,
    shared_errors.PayloadTooLarge,
    shared_errors.Unavailable,
    shared_errors.UnknownAdapter,
    shared_errors.UnknownModel,
    shared_errors.UnsupportedContent,
    shared_errors.UnsupportedVersion,
)
"""Errors with which a renderer may reply."""

ANSWER_ERRORS: Errors = (
    *RENDERER_ERRORS,
    shared_errors.Cancelled,
    shared_errors.DeadlineExceeded,
    shared_errors.DiskFull,
    shared_errors.GrammarNotTried,
    shared_errors.InvalidGrammar,
    shared_errors.LogTruncated,
    shared_errors.Poisoned,
    shared_errors.TokenRateExceeded,
    shared_errors.QuotaExceeded,
    errors.AnswerTooLarge,
    errors.Interrupted,
    errors.ReusedId,
)
"""Errors with which an answer may end."""

LAST_EVENT = Parameter("Last-Event-ID", "header", "Id of the last event that was read")
FROM = Parameter(
    "from", "query", "The first record of the stream to send", Annotated[int, Meta(ge=0)]
)
ID_PARAMETERS = (
    Parameter(
        "X-Request-Id",
        "header",
        "1 to 256 printable characters that name the request. If they are sent again, the answer to"
        " the first request continues",
    ),
    Parameter("Idempotency-Key", "header", "Another header for the same name. It takes precedence"),
)
STREAM_PARAMETERS = (*ID_PARAMETERS, LAST_EVENT, FROM)
