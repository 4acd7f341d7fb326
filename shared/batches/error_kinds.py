"""Kinds of errors in the lines of an error file. Pure."""

import contextlib

import msgspec
from msgspec import Raw, Struct

from shared.protocol.encoding import UNDECODABLE


class _Error(Struct, frozen=True):
    code: str | None = None


class _Response(Struct, frozen=True):
    status_code: int
    body: Raw


class _Line(Struct, frozen=True):
    error: _Error | None = None
    response: _Response | None = None


class _Body(Struct, frozen=True):
    error: _Error


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def kind_of(line: bytes) -> str:
    """Return the code of the error in a line of an error file, or else the status of its answer."""
    try:
        parsed = _decode_line(line)
    except UNDECODABLE:
        return "unknown"
    error = parsed.error
    if parsed.response is not None:
        with contextlib.suppress(*UNDECODABLE):
            error = _decode_body(parsed.response.body).error
    if error is not None and error.code:
        return error.code
    return "unknown" if parsed.response is None else f"status {parsed.response.status_code}"
