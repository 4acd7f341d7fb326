"""Encodings of messages: JSON for clients, msgpack between workers."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shared.protocol.value_limits import check_json, check_msgpack

T = TypeVar("T")

JsonObject = dict[str, Any]

to_json = msgspec.json.Encoder().encode


to_msgpack = msgspec.msgpack.Encoder().encode


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """Base of messages between workers.

    The version is raised when an older reader would misread a message. New optional fields do not
    raise it.
    """

    version: int = 1


UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All errors of msgspec's decoders."""


def is_packed(data: bytes) -> bool:
    """Return whether a message is msgpack. JSON objects start with a brace or white space."""
    return bool(data) and data[0] >= 0x80


def json_or_msgpack(kind: type[T], *, checked: bool = False) -> Callable[[bytes], T]:
    """Return a decoder of clients' messages, which may be JSON or msgpack.

    Unless the bytes are `checked` already, the decoder first raises ValidationError for an exceeded
    limit of `shared.protocol.value_limits`, before it creates any object.
    """
    from_json, from_msgpack = msgspec.json.Decoder(kind), msgspec.msgpack.Decoder(kind)

    def decode(data: bytes) -> T:
        packed = is_packed(data)
        if not checked:
            (check_msgpack if packed else check_json)(data)
        return (from_msgpack if packed else from_json).decode(data)

    return decode


def or_none(decode: Callable[[bytes], T]) -> Callable[[bytes], T | None]:
    """Return a decoder that returns None for undecodable bytes, which any client may publish."""

    def decode_or_none(data: bytes) -> T | None:
        try:
            return decode(data)
        except UNDECODABLE:
            return None

    return decode_or_none
