"""The message that tells all workers which tenants have stored too much. Pure."""

import msgspec
from msgspec import Struct

from shared.protocol.encoding import Versioned, or_none


class ExceededShare(Struct, frozen=True):
    """A tenant that has stored as much in a stream as it may have for now."""

    stream: str
    tenant: str
    """Empty for every tenant that has nothing stored."""
    num_bytes: int
    """What it has stored."""
    max_bytes: int
    """Its share, which grows as messages of others expire."""


class ExceededShares(Versioned, frozen=True):
    """The tenants that are refused while their messages take too much of the streams."""

    exceeded: list[ExceededShare]


decode_exceeded_shares = or_none(msgspec.json.Decoder(ExceededShares).decode)
