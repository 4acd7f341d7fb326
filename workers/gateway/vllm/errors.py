"""Error responses of the endpoints that speak vLLM's token protocol. Pure.

Statuses and types follow the protocol where it differs from OpenAI's API. The codes are Pagemill's,
because several errors share a code in the protocol.
"""

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from shared.errors import InvalidRequest, PagemillError, RequestError
from shared.protocol.records import ErrorInfo
from shared.protocol.value_limits import check_json
from workers.gateway.http import errors
from workers.gateway.http.errors import (
    ErrorAnswer,
    UnknownParameter,
    UnsupportedParameter,
    WrongContentType,
)

T = TypeVar("T")

_STATUSES = {WrongContentType.code: 400, "invalid_media": 400, "media_not_found": 400}
_BODY = "body"


def status_of(error: ErrorInfo | type[PagemillError]) -> int:
    return _STATUSES.get(error.code, errors.status_of(error))


def body_of(error: ErrorInfo) -> ErrorAnswer:
    """Return the body. Errors that the client did not cause have the types of OpenAI's API."""
    body, status = errors.body_of(error).error, status_of(error)
    if status == 404:
        body = replace(body, type="NotFoundError")
    elif status in (400, 422):
        is_in_body = (error.field or "").partition(".")[0] == _BODY
        body = replace(body, type="Bad Request" if is_in_body else "BadRequestError")
    return ErrorAnswer(body)


def decode(data: bytes, body_type: type[T], unsupported: frozenset[str] = frozenset()) -> T:
    """Decode a body. Raises a RequestError; its field is `body.` followed by the path in the body.

    `unsupported` has the paths of fields that the protocol has and this server does not support.
    """
    try:
        check_json(data)
        return msgspec.json.decode(data, type=body_type)
    except msgspec.ValidationError as error:
        raise _refusal(error, unsupported) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field=_BODY) from error


def _refusal(error: msgspec.ValidationError, unsupported: frozenset[str]) -> RequestError:
    complaint, path, name = errors.split_field_error(error)
    path = path.partition("[")[0]
    path = f"{path}.{name}".removeprefix(".") if name else path
    field = f"{_BODY}.{path}" if path else _BODY
    if path in unsupported or path.partition(".")[0] in unsupported:
        return UnsupportedParameter(f"{field}: not supported here", field=field)
    if complaint == errors.UNKNOWN_FIELD:
        return UnknownParameter(f"{field}: unknown parameter", field=field)
    if complaint == errors.MISSING_FIELD:
        complaint = "Field required"
    return InvalidRequest(f"{field}: {complaint}", field=field)


def body_error(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=f"body.{path}" if path else "body")
