"""Encodings of messages: JSON for clients, msgpack between workers."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from shared.helpers.validation import invalid_request
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


class ClientDecoder(Generic[T]):
    """Decoder of clients' messages of one type, which may be JSON or msgpack.

    Unless the bytes are `checked` already, it first raises ValidationError for an exceeded limit of
    `shared.protocol.value_limits`, before it creates any object.
    """

    def __init__(self, kind: type[T], *, checked: bool = False) -> None:
        self.kind = kind
        self._checked = checked
        self._from_json = msgspec.json.Decoder(kind).decode
        self._from_msgpack = msgspec.msgpack.Decoder(kind).decode

    def __call__(self, data: bytes) -> T:
        """Raises the errors of UNDECODABLE."""
        packed = is_packed(data)
        if not self._checked:
            (check_msgpack if packed else check_json)(data)
        return (self._from_msgpack if packed else self._from_json)(data)

    def read(self, data: bytes) -> T:
        """Decode a message. Raises InvalidRequest, which names the wrong field and what is
        allowed."""
        try:
            return self(data)
        except UNDECODABLE as error:
            raise invalid_request(error, self.kind) from error


def or_none(decode: Callable[[bytes], T]) -> Callable[[bytes], T | None]:
    """Return a decoder that returns None for undecodable bytes, which any client may publish."""

    def decode_or_none(data: bytes) -> T | None:
        try:
            return decode(data)
        except UNDECODABLE:
            return None

    return decode_or_none
