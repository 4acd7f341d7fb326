"""Id of a request, from the message that its client has published."""

from msgspec import Struct

from shared.protocol import names, subjects
from shared.protocol.encoding import json_or_msgpack, or_none


class _OnlyId(Struct, frozen=True):
    request_id: str | None = None


# Decodes a single field of a request, and skips the other fields.
_decode_id = or_none(json_or_msgpack(_OnlyId, checked=True))


def request_id_of(header: str | None, data: bytes, subject: str) -> str | None:
    """Return the id of a request, even if its other fields are invalid; None without a valid id.

    The ids of different tenants' clients never collide.
    """
    if header is None:
        body = _decode_id(data)
        header = None if body is None else body.request_id
    if header is None or not names.is_request_id(header):
        return None
    return names.scoped_id(header, subjects.tenant_of(subject))
