"""Error responses in OpenAI's format: an HTTP status, and `{"error": {...}}`. Pure.

An error that the client has caused carries its message and field. An internal error gets a fixed
message, which does not reveal its cause.
"""

from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import (
    DiskFull,
    InvalidRequest,
    NumberOverflow,
    Overloaded,
    PagemillError,
    RequestError,
    ToolFailure,
    ToolsUnavailable,
    Unavailable,
    UnsupportedContent,
    WorkerFailure,
)
from shared.helpers.validation import complaint_of
from shared.protocol.records import ErrorInfo, error_info


class InvalidKey(RequestError):
    code = "invalid_api_key"


class MissingRight(RequestError):
    """The key is valid, but does not have the right that the endpoint needs."""

    code = "missing_right"


class RateLimited(RequestError):
    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = wait_s


class NoPlace(Overloaded):
    """The gateway has no place for a connection, or for another request of a tenant."""

    fault = "client"


class UnknownParameter(RequestError):
    code = "unknown_parameter"


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"


class UnknownRoute(RequestError):
    code = "unknown_url"


class ReusedId(RequestError):
    code = "request_id_reused"


class UnknownPreviousResponse(RequestError):
    code = "previous_response_not_found"


class ApprovalUsed(RequestError):
    code = "approval_used"


class StoreFull(PagemillError):
    """The store of responses has no room, or a tenant's share of it is used up."""

    code = "response_store_full"
    retryable = True
    retry_after_s = 60.0


class WrongMethod(RequestError):
    code = "method_not_allowed"


class WrongContentType(RequestError):
    code = "unsupported_content_type"


class BodyTooLarge(RequestError):
    code = "body_too_large"


class AnswerTooLarge(RequestError):
    """An answer that is not streamed would take too much memory."""

    code = "answer_too_large"


class RangeNotSatisfiable(RequestError):
    code = "range_not_satisfiable"

    def __init__(self, message: str, total: int) -> None:
        super().__init__(message, field="Range")
        self.total = total
        """Number of bytes of the body."""


class UnknownCoding(RequestError):
    """The header Transfer-Encoding has a coding other than `chunked`."""

    code = "unknown_transfer_coding"


class HeadersTooLarge(RequestError):
    code = "headers_too_large"


class ForeignHost(RequestError):
    """The Host header has a host name that this gateway does not serve."""

    code = "foreign_host"


class ForeignOrigin(RequestError):
    """A web page of another site has sent the request to a gateway without keys."""

    code = "foreign_origin"


class RequestTimeout(RequestError):
    code = "request_timeout"


class Interrupted(PagemillError):
    """The response broke off because this gateway shuts down; the request continues."""

    code = "interrupted"

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down")


class RequestFailed(PagemillError):
    """A request failed at another worker. `info` has the client's names of fields."""

    def __init__(self, info: ErrorInfo, event_id: str) -> None:
        super().__init__(info.message, field=info.field)
        self.info = info
        self.event_id = event_id


STATUSES = {
    InvalidKey.code: 401,
    "media_url_blocked": 403,
    ForeignOrigin.code: 403,
    MissingRight.code: 403,
    "unknown_model": 404,
    "unknown_adapter": 404,
    "not_found": 404,
    UnknownRoute.code: 404,
    UnknownPreviousResponse.code: 404,
    WrongMethod.code: 405,
    RequestTimeout.code: 408,
    "log_truncated": 410,
    "payload_too_large": 413,
    BodyTooLarge.code: 413,
    WrongContentType.code: 415,
    ApprovalUsed.code: 409,
    RangeNotSatisfiable.code: 416,
    ForeignHost.code: 421,
    "invalid_media": 422,
    "media_too_large": 422,
    "media_not_found": 422,
    "mm_cache_miss": 422,
    ReusedId.code: 422,
    RateLimited.code: 429,
    "too_many_batches": 429,
    "token_rate_exceeded": 429,
    "storage_quota_exceeded": 429,
    HeadersTooLarge.code: 431,
    UnknownCoding.code: 501,
    "unavailable": 503,
    "overloaded": 503,
    "unsupported_version": 503,
    StoreFull.code: 503,
    ToolsUnavailable.code: 503,
    "grammar_not_tried": 503,
    Interrupted.code: 503,
    "deadline_exceeded": 504,
    DiskFull.code: 507,
}
"""HTTP status by error code. Any other code has 400 if the client caused the error, else 500."""

# Messages of internal errors, by code.
_MESSAGES = {
    "unavailable": "the service is temporarily unavailable; try again",
    "overloaded": "too many requests are waiting; try again a little later",
    StoreFull.code: "no further response can be stored, not even with `store: false`: delete some,"
    " or wait until some have expired",
    "grammar_not_tried": "the machine was too busy to check the grammar; try again a little later",
    Interrupted.code: "this gateway is shutting down, and the request continues without it: ask"
    " another gateway for /v1/requests/{id} with the id from the header X-Request-Id",
    "out_of_memory": "the request needs more memory than the device of the model has: shorten it,"
    " or send fewer or smaller images",
    "deadline_exceeded": "the request did not end before its deadline",
    "log_truncated": "the beginning of the answer is no longer stored",
    "poison": "the request was abandoned after workers had failed on it repeatedly",
}
# Internal errors whose own messages are sent to clients.
_PUBLIC = (ToolFailure.code, ToolsUnavailable.code, DiskFull.code, NumberOverflow.code)
_INTERNAL = "the request failed because of an internal error; it is safe to send it again"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


UNSUPPORTED_CONTENT = ("file", "image_embeds", "audio_embeds", "video_embeds")
"""Types of message parts that other servers accept. They have a separate error, because the client
has not misspelled them."""


UNSUPPORTED_TOOLS = (
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation",
    "computer", "computer_use_preview", "local_shell", "shell", "apply_patch", "custom",
    "namespace", "tool_search", "programmatic_tool_calling",
)  # fmt: skip
"""Types of tools that OpenAI runs itself."""


class ErrorBody(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct, frozen=True):
    error: ErrorBody


def status_of(error: ErrorInfo | type[PagemillError]) -> int:
    return STATUSES.get(error.code, 400 if error.fault == "client" else 500)


def body_of(error: ErrorInfo) -> ErrorAnswer:
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    client = error.fault == "client"
    is_public = client or error.code in _PUBLIC
    message = error.message if is_public else _MESSAGES.get(error.code, _INTERNAL)
    # `Unavailable` may name `X-Request-Id`, because a retry with another id is another request.
    field = error.field if client or error.code == Unavailable.code else None
    return ErrorAnswer(ErrorBody(message, kind, field, error.code))


def info_of(error: Exception) -> ErrorInfo:
    """Return the error report for an exception. An unexpected exception is an internal error."""
    if isinstance(error, RequestFailed):
        return error.info
    if isinstance(error, PagemillError):
        return error_info(error)
    return error_info(WorkerFailure("unexpected exception"))


def validation_error(
    error: msgspec.ValidationError, unsupported: frozenset[str], body_type: Any, root: str = ""
) -> RequestError:
    """Return the error for a value at the path `root` that does not have the endpoint's type.

    Its message has the allowed values, or the most similar field. `unsupported` are the names of
    parameters that are known but not implemented.
    """
    complaint = complaint_of(error, body_type, root)
    path, _, kind, tag = complaint
    inner = path.removeprefix(root).removeprefix(".")
    if kind == "unknown":
        if inner in unsupported:
            return UnsupportedParameter(f"{path} is not supported here", field=path)
        return UnknownParameter(complaint.sentence(), field=path)
    if tag in UNSUPPORTED_CONTENT:
        part = path.removesuffix(".type")
        return UnsupportedContent(f"{tag} is not supported by this model", field=part)
    if tag in UNSUPPORTED_TOOLS:
        return UnsupportedParameter(f"{path}: {tag!r} is not supported here", field=path)
    name = inner.partition(".")[0].partition("[")[0]
    if kind != "missing" and name in unsupported:
        field = path[: len(path) - len(inner) + len(name)]
        return UnsupportedParameter(f"{field}: this value is not supported here", field=field)
    return InvalidRequest(complaint.sentence(), field=path or None)
