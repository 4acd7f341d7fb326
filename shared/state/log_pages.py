"""Pages of logs, for clients that have missed records."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Raw

from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.errors import LogTruncated
from shared.protocol import subjects
from shared.protocol.reading import MAX_RECORDS, LogPage
from shared.state.log_records import UnknownRecord, decode_record, is_final

# Messages that are read at once. Each takes the event loop a tenth of a millisecond.
BATCH = 32


@dataclass(frozen=True, slots=True)
class PagedRecord:
    """Record of a log, as far as pages need it."""

    index: int
    is_last: bool
    is_known: bool = True


class PagedLog(NamedTuple):
    """A log with records that are numbered without a gap."""

    stream: str
    subject: str
    decode: Callable[[bytes], PagedRecord | None]
    """Returns None for a message that is not a record."""


async def read_page(
    bus: Bus,
    request_id: str,
    output: str,
    start: int,
    max_bytes: int,
    wait_turn: Callable[[], Awaitable[None]],
) -> LogPage | None:
    """Return a page of a token log like `read_page_of`."""
    log = PagedLog(subjects.TOKENS_STREAM, subjects.tokens(request_id, output), _decode)
    return await read_page_of(bus, log, start, max_bytes, wait_turn)


def _decode(data: bytes) -> PagedRecord | None:
    record = decode_record(data)
    if record is None:
        return None
    return PagedRecord(record.index, is_final(record), not isinstance(record, UnknownRecord))


async def read_page_of(
    bus: Bus,
    log: PagedLog,
    start: int,
    max_bytes: int,
    wait_turn: Callable[[], Awaitable[None]],
) -> LogPage | None:
    """Return the records of a log from number `start` on; None for a log without any record.

    They are at most MAX_RECORDS, and have at most `max_bytes` with a separator after each, unless
    the first one has more. `wait_turn` is awaited before each batch of messages. Raises
    LogTruncated if record `start` has been removed, and Unavailable.
    """
    batch, sequence = await _seek(bus, log, start)
    records: list[Raw] = []
    last: PagedRecord | None = None
    expected, num_bytes, more = start, 0, True
    while True:
        for message in batch:
            record = log.decode(message.data)
            if record is None or (not record.is_known and record.index != expected):
                continue
            last = record
            if record.index < expected:
                continue
            num_bytes += len(message.data) + 1
            is_full = num_bytes > max_bytes or len(records) == MAX_RECORDS
            if records and (is_full or record.index > expected):
                return LogPage(records, expected, ended=False)
            if record.index > expected:
                raise LogTruncated(
                    f"the records before {record.index} have been removed to make room: read from"
                    f" {record.index}",
                    field="from",
                )
            records.append(Raw(message.data))
            expected += 1
        if not more:
            return None if last is None else LogPage(records, expected, ended=last.is_last)
        await wait_turn()
        batch, more = await bus.read_batch(log.stream, log.subject, sequence, max_bytes, BATCH)
        sequence = batch[-1].sequence + 1 if batch else sequence


async def _seek(bus: Bus, log: PagedLog, start: int) -> tuple[list[StoredMessage], int]:
    """Search for record `start`. The sequences of a log's records rise with their numbers.

    Return the latest earlier record that was read, if any, and a sequence after it that is not
    after record `start`.
    """
    before: list[StoredMessage] = []
    last = await bus.read_last(log.stream, log.subject) if start else None
    low, high = 1, 1 if last is None else last.sequence
    while low < high:
        middle = (low + high) // 2
        message = await bus.read_next(log.stream, middle, log.subject)
        record = None if message is None else log.decode(message.data)
        if message is not None and record is not None and record.is_known and record.index < start:
            low, before = message.sequence + 1, [message]
        else:
            high = middle
    return before, low
