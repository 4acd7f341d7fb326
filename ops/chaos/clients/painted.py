"""Readers of painted images, and their notes in the journal."""

import hashlib
from collections.abc import Awaitable, Callable

from ops.chaos.history import ImageReceived, Journal, now
from ops.chaos.plan import PAINTED, Planned
from shared import client
from shared.bus.bus import Bus
from shared.protocol.records import ImageRecord


async def read_images(
    bus: Bus,
    planned: Planned,
    session: int,
    journal: Journal,
    on_record: Callable[[int], Awaitable[None]],
) -> None:
    """Note the images of a request; `on_record` is awaited with the number of each record.

    Raises PagemillError.
    """
    async for record in client.follow_output(bus, planned.id, PAINTED, timeout_s=planned.timeout_s):
        if isinstance(record, ImageRecord):
            data = await client.read_media(bus, record.media)
            digest = hashlib.sha256(data).hexdigest()
            journal.write(ImageReceived(now(), planned.id, session, record.number, digest))
        await on_record(record.index)
