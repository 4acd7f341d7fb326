"""Errors in the form of Anthropic's API. Pure.

Statuses and types are Anthropic's where it differs from OpenAI's API. The codes are Pagemill's, in
an additional field.
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
    if error.code == Overloaded.code:
        return 529
    status = errors.status_of(error)
    return 400 if status == 422 else status


def body_of(error: ErrorInfo) -> MessageErrorAnswer:
    body, status = errors.body_of(error).error, status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return MessageErrorAnswer(MessageError(kind, body.message, body.code, body.param))
