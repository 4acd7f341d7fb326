"""Message that lists the tenants over their share of storage, for all workers. Pure."""

import msgspec
from msgspec import Struct

from shared.protocol.encoding import Versioned, or_none


class ExceededShare(Struct, frozen=True):
    """Tenant that is over its share of a stream."""

    stream: str
    tenant: str
    """Empty for every tenant without stored messages."""
    num_bytes: int
    """Bytes that the tenant has stored."""
    max_bytes: int
    """Share of the tenant, which grows as messages of other tenants expire."""


class ExceededShares(Versioned, frozen=True):
    """Tenants over their share. Their requests are refused until stored messages have expired."""

    exceeded: list[ExceededShare]


decode_exceeded_shares = or_none(msgspec.json.Decoder(ExceededShares).decode)
