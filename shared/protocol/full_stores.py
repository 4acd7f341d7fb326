"""Message that lists the broker's stores with too little free space, for all workers. Pure."""

import msgspec
from msgspec import Struct

from shared.protocol.encoding import Versioned, or_none


class FullStore(Struct, frozen=True):
    """Store of the broker with less free space than the settings require."""

    name: str
    """`nats.store_dir` of an embedded broker, or the name of a server."""
    free_bytes: int
    """Free space of its disk; for a named server the unused part of its `max_file_store`."""
    min_free_bytes: int
    """Free space that is required."""


class FullStores(Versioned, frozen=True):
    """Full stores that one observer has found. New requests are refused until they have room."""

    stores: list[FullStore]


decode_full_stores = or_none(msgspec.json.Decoder(FullStores).decode)
