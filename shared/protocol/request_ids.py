"""The id of a request, from the message that its client has published."""

from msgspec import Struct

from shared.protocol import names, subjects
from shared.protocol.encoding import json_or_msgpack, or_none


class _OnlyId(Struct, frozen=True):
    request_id: str | None = None


# Decodes a part of a request, whose other fields are not looked at.
_decode_id = or_none(json_or_msgpack(_OnlyId, checked=True))


def request_id_of(header: str | None, data: bytes, subject: str) -> str | None:
    """The id under which a request can be answered, even if the rest of it is of no use.

    The ids of each tenant's clients are apart from those of all others.
    """
    if header is None:
        found = _decode_id(data)
        header = None if found is None else found.request_id
    if header is None or not names.is_request_id(header):
        return None
    return names.scoped_id(header, subjects.tenant_of(subject))
