"""Room in the stream of batches, which refuses messages when it is full.

Input files and results leave a part of it free, so that batches can be cancelled and can end, and
their results be deleted, also when there is no room for anything else.
"""

from shared.bus.bus import Bus
from shared.errors import Overloaded
from shared.protocol import subjects

RESERVE = 1 / 64
"""Part of the stream for small records: cancellations, and the records of batches other than
results."""


async def check(bus: Bus, num_bytes: int) -> None:
    """Raise Overloaded if further content of this size would not leave the reserve free.

    Raises Unavailable.
    """
    max_bytes, stored_bytes = await bus.figures.fill(subjects.BATCHES_STREAM)
    limit = int(max_bytes * (1 - RESERVE))
    if stored_bytes + num_bytes > limit:
        raise Overloaded(
            f"batches and their files have {stored_bytes} bytes, and {num_bytes} more are over the"
            f" limit of {limit} bytes: delete files of batches, or raise batch.store_mib"
        )
