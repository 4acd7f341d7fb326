"""What the token endpoints answer when they refuse: statuses and types of the protocol that they
speak, where those differ from OpenAI's; codes are ours, for the other has none that tell. Pure.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from shared.errors import InvalidRequest, PagemillError, RequestError
from shared.protocol.messages import ErrorInfo
from shared.validation import split_validation_error
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


def is_their_fault(error: ErrorInfo) -> bool:
    return error.fault == "client"


def status_of(error: ErrorInfo | type[PagemillError]) -> int:
    return _STATUSES.get(error.code, errors.status_of(error))


def body_of(error: ErrorInfo) -> ErrorAnswer:
    told = errors.body_of(error).error
    kind = _type_of(status_of(error), error.field) or told.type
    return ErrorAnswer(ErrorBody(told.message, kind, told.param, told.code))


def _type_of(status: int, field: str | None) -> str | None:
    """None for what is no fault of the request itself."""
    if status == 404:
        return "NotFoundError"
    if status not in (400, 422):
        return None
    of_body = field is not None and field.partition(".")[0] == _BODY
    return "Bad Request" if of_body else "BadRequestError"


def decode(
    data: bytes, decoder: Callable[[bytes], T], unsupported: frozenset[str] = frozenset()
) -> T:
    """What `decoder` makes of a body. Raises a RequestError with `body.` and the path as field.

    `unsupported` are paths that are known, and not done here.
    """
    try:
        return decoder(data)
    except msgspec.ValidationError as error:
        raise _refused(error, unsupported) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field=_BODY) from error


def _refused(error: msgspec.ValidationError, unsupported: frozenset[str]) -> RequestError:
    what, path = split_validation_error(error)
    path = path.partition("[")[0]
    unknown, missing = "Object contains unknown field `", "Object missing required field `"
    for prefix in (unknown, missing):
        if what.startswith(prefix):
            name = what.removeprefix(prefix).removesuffix("`")
            path = f"{path}.{name}".removeprefix(".")
            what = "Field required" if prefix is missing else what
    field = f"{_BODY}.{path}" if path else _BODY
    if path in unsupported or path.partition(".")[0] in unsupported:
        return UnsupportedParameter(f"{field}: not supported here", field=field)
    if what.startswith(unknown):
        return UnknownParameter(f"{field}: unknown parameter", field=field)
    return InvalidRequest(f"{field}: {what}", field=field)


def wrong(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=f"body.{path}" if path else "body")
