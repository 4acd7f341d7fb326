"""Error responses of the endpoints that speak vLLM's token protocol. Pure.

Statuses and types are those of the protocol, where they differ from OpenAI's. The codes are
Pagemill's own, because the protocol's do not tell errors apart.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from shared.errors import InvalidRequest, PagemillError, RequestError
from shared.protocol.records import ErrorInfo
from workers.gateway.http import errors
from workers.gateway.http.errors import (
    ErrorAnswer,
    ErrorBody,
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
    openai = errors.body_of(error).error
    error_type = _type_of(status_of(error), error.field) or openai.type
    return ErrorAnswer(ErrorBody(openai.message, error_type, openai.param, openai.code))


def _type_of(status: int, field: str | None) -> str | None:
    """Return the protocol's type, or None for an error that the request itself did not cause."""
    if status == 404:
        return "NotFoundError"
    if status not in (400, 422):
        return None
    is_in_body = field is not None and field.partition(".")[0] == _BODY
    return "Bad Request" if is_in_body else "BadRequestError"


def decode(
    data: bytes, decoder: Callable[[bytes], T], unsupported: frozenset[str] = frozenset()
) -> T:
    """Decode a body. Raises a RequestError with `body.` and the path as field.

    `unsupported` are paths that the protocol has and this server does not support.
    """
    try:
        return decoder(data)
    except msgspec.ValidationError as error:
        raise _refusal(error, unsupported) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field=_BODY) from error


def _refusal(error: msgspec.ValidationError, unsupported: frozenset[str]) -> RequestError:
    what, path, name = errors.split_field_error(error)
    path = f"{path.partition('[')[0]}.{name}".strip(".")
    field = f"{_BODY}.{path}" if path else _BODY
    if path in unsupported or path.partition(".")[0] in unsupported:
        return UnsupportedParameter(f"{field}: not supported here", field=field)
    if what == errors.UNKNOWN_FIELD:
        return UnknownParameter(f"{field}: unknown parameter", field=field)
    if what == errors.MISSING_FIELD:
        what = "Field required"
    return InvalidRequest(f"{field}: {what}", field=field)


def body_error(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=f"body.{path}" if path else "body")
