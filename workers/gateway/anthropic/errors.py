"""Errors in the form of Anthropic's API. Pure.

Statuses and types are as in Anthropic's API, also where it differs from OpenAI's. An additional
field has Pagemill's code.
"""

from shared.errors import Overloaded, PagemillError
from shared.protocol.records import ErrorInfo
from workers.gateway.http import errors
from workers.gateway.schemas.messages import MessageError, MessageErrorAnswer

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def status_of(error: ErrorInfo | type[PagemillError]) -> int:
    """Return the HTTP status of an error."""
    if error.code == Overloaded.code:
        return 529
    status = errors.status_of(error)
    return 400 if status == 422 else status


def body_of(error: ErrorInfo) -> MessageErrorAnswer:
    """Return the body of the response for an error."""
    body, status = errors.body_of(error).error, status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return MessageErrorAnswer(MessageError(kind, body.message, body.code, body.param))
