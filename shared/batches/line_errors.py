"""Codes of the errors in error files. Pure."""

import msgspec
from msgspec import Struct

from shared.protocol.encoding import UNDECODABLE

UNKNOWN = "unknown"


class _Error(Struct, frozen=True):
    code: str = UNKNOWN


class _Body(Struct, frozen=True):
    error: _Error = _Error()


class _Response(Struct, frozen=True):
    body: _Body = _Body()


class _Line(Struct, frozen=True):
    response: _Response | None = None
    error: _Error | None = None


_read = msgspec.json.Decoder(_Line).decode
_read_body = msgspec.json.Decoder(_Body).decode


def code_in_body(content: bytes) -> str:
    """Return the code in the body of an endpoint's error."""
    try:
        return _read_body(content).error.code or UNKNOWN
    except UNDECODABLE:
        return UNKNOWN


def error_code_of(content: bytes) -> str:
    """Return the code of a line of an error file: of the batch's error, or of the endpoint's."""
    try:
        line = _read(content)
    except UNDECODABLE:
        return UNKNOWN
    return (line.error or (line.response or _Response()).body.error).code or UNKNOWN
