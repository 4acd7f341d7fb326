"""The order in which the parts of an answer are shown where one continues the other. Pure."""

from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator

from shared.protocol.records import AnyRecord, Failure, Finish


async def in_part_order(
    records: AsyncIterator[tuple[int, AnyRecord]],
) -> AsyncGenerator[tuple[int, AnyRecord], None]:
    """Yield the records of each part behind the end of the part before it.

    All parts are read as they come. A failure is not held back, because it ends the answer.
    """
    held: dict[int, deque[AnyRecord]] = defaultdict(deque)
    turn = 0
    async for part, record in records:
        if isinstance(record, Failure):
            yield part, record
            continue
        held[part].append(record)
        while held[turn]:
            shown = held[turn].popleft()
            yield turn, shown
            turn += isinstance(shown, Finish)
