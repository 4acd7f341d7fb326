"""Error responses of the endpoints that speak vLLM's token protocol. Pure.

Statuses and types follow the protocol where it differs from OpenAI's API. The codes are Pagemill's,
because several errors share a code in the protocol.
"""

from msgspec.structs import replace

from shared.errors import InvalidRequest, PagemillError
from shared.protocol.records import ErrorInfo
from workers.gateway.http import errors
from workers.gateway.http.errors import ErrorAnswer, WrongContentType

_STATUSES = {WrongContentType.code: 400, "invalid_media": 400, "media_not_found": 400}
BODY = "body"
"""Root of the paths of fields in errors."""


def status_of(error: ErrorInfo | type[PagemillError]) -> int:
    return _STATUSES.get(error.code, errors.status_of(error))


def body_of(error: ErrorInfo) -> ErrorAnswer:
    """Return the body. Errors that the client did not cause have the types of OpenAI's API."""
    body, status = errors.body_of(error).error, status_of(error)
    if status == 404:
        body = replace(body, type="NotFoundError")
    elif status in (400, 422):
        is_in_body = (error.field or "").partition(".")[0] == BODY
        body = replace(body, type="Bad Request" if is_in_body else "BadRequestError")
    return ErrorAnswer(body)


def body_error(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=f"{BODY}.{path}" if path else BODY)
