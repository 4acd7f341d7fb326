"""Pages of a token log on a real server, which has other logs between its records."""

import secrets

import pytest

from shared.bus.bus import Bus
from shared.errors import LogTruncated
from shared.protocol import subjects
from shared.protocol.pipeline import TEXT
from shared.protocol.reading import MAX_RECORDS, LogPage
from shared.protocol.records import ChoiceDelta, OutputSummary, Usage
from shared.state.log_pages import BATCH, read_page
from shared.state.token_log import LogWriter

FOREIGN = b'{"type":"tokens"'
LATER_KIND = b'{"type":"later","index":%d,"attempt":1}'


def delta(text: str) -> list[ChoiceDelta]:
    return [ChoiceDelta(index=0, position=0, token_ids=[1], text=text)]


async def write(bus: Bus, request_id: str, number: int, *, ends: bool = True) -> list[bytes]:
    """Write a log with records of another one between its own; return its messages."""
    log = await LogWriter.open(bus, request_id, 1)
    other = await LogWriter.open(bus, f"other-{request_id}", 1)
    for index in range(number):
        await log.tokens(delta("x" * index))
        for _ in range(index % 3):
            await other.tokens(delta("other"))
    if ends:
        await log.finish(OutputSummary(Usage(1, number), 1), {})
    return await messages_of(bus, request_id)


async def messages_of(bus: Bus, request_id: str) -> list[bytes]:
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id))
    return [message.data for message in stored]


async def append(bus: Bus, request_id: str, data: bytes) -> None:
    """Append to a log as a worker can that does not follow the rules."""
    await bus.publish_without_id(subjects.append(request_id), data)


async def proceed() -> None:
    """Wait for nothing before a batch."""


async def page_of(bus: Bus, request_id: str, start: int, max_bytes: int = 2**18) -> LogPage:
    page = await read_page(bus, request_id, TEXT, start, max_bytes, proceed)
    assert page is not None
    return page


async def pages_of(bus: Bus, request_id: str, max_bytes: int) -> list[LogPage]:
    """Read a log to its end, page by page."""
    pages = [await page_of(bus, request_id, 0, max_bytes)]
    while not pages[-1].ended:
        pages.append(await page_of(bus, request_id, pages[-1].next, max_bytes))
    return pages


def data_of(*pages: LogPage) -> list[bytes]:
    return [bytes(record) for page in pages for record in page.records]


@pytest.mark.parametrize("max_bytes", [1, 100, 1000, 2**18])
async def test_pages_have_each_message_of_a_log_once(
    bus: Bus, request_id: str, max_bytes: int
) -> None:
    messages = await write(bus, request_id, 30)
    pages = await pages_of(bus, request_id, max_bytes)
    assert data_of(*pages) == messages
    for page in pages:
        data = data_of(page)
        assert len(data) == 1 or sum(len(message) + 1 for message in data) <= max_bytes
    assert len(pages) == (31 if max_bytes == 1 else 1 if max_bytes == 2**18 else len(pages))


async def test_a_page_begins_at_any_record(bus: Bus, request_id: str) -> None:
    messages = await write(bus, request_id, 20)
    for start in range(len(messages) + 3):
        page = await page_of(bus, request_id, start)
        assert data_of(page) == messages[start:]
        assert page.ended
        assert page.next == max(start, len(messages))


async def test_the_last_page_of_an_open_log_is_empty(bus: Bus, request_id: str) -> None:
    await write(bus, request_id, 3, ends=False)
    assert (await page_of(bus, request_id, 0)).ended is False
    for start in (3, 4):
        page = await page_of(bus, request_id, start)
        assert (page.records, page.next, page.ended) == ([], start, False)


async def test_a_log_without_a_record_has_no_page(bus: Bus, request_id: str) -> None:
    for start in (0, 5):
        assert await read_page(bus, request_id, TEXT, start, 1000, proceed) is None
    await append(bus, request_id, FOREIGN)
    for start in (0, 5):
        assert await read_page(bus, request_id, TEXT, start, 1000, proceed) is None


async def test_foreign_bytes_are_in_no_page(bus: Bus, request_id: str) -> None:
    await append(bus, request_id, FOREIGN)
    log = await LogWriter.open(bus, request_id, 1)
    for index in range(8):
        await log.tokens(delta(str(index)))
        await append(bus, request_id, FOREIGN)
        # Its index continues no log.
        await append(bus, request_id, LATER_KIND % 77)
    await log.finish(OutputSummary(Usage(1, 8), 1), {})
    await append(bus, request_id, FOREIGN)
    records = [data for data in await messages_of(bus, request_id) if b"later" not in data]
    records = [data for data in records if data != FOREIGN]
    assert data_of(*await pages_of(bus, request_id, 1)) == records
    for start in range(len(records) + 2):
        page = await page_of(bus, request_id, start)
        assert data_of(page) == records[start:]
        assert page.ended


async def test_a_record_of_a_later_kind_is_a_record(bus: Bus, request_id: str) -> None:
    for index in range(5):
        await append(bus, request_id, LATER_KIND % index)
    messages = await messages_of(bus, request_id)
    for start in range(5):
        assert data_of(await page_of(bus, request_id, start)) == messages[start:]


async def test_a_removed_record_is_an_error_that_names_the_first_one(
    bus: Bus, request_id: str
) -> None:
    messages = await write(bus, request_id, 7)
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id))
    for number in (0, 1, 5):
        await bus.delete(subjects.TOKENS_STREAM, stored[number].sequence)
    for start in (0, 1):
        with pytest.raises(LogTruncated, match="read from 2") as raised:
            await read_page(bus, request_id, TEXT, start, 2**18, proceed)
        assert raised.value.field == "from"
    page = await page_of(bus, request_id, 2)
    assert (data_of(page), page.next, page.ended) == (messages[2:5], 5, False)
    with pytest.raises(LogTruncated, match="read from 6"):
        await read_page(bus, request_id, TEXT, 5, 2**18, proceed)
    assert data_of(await page_of(bus, request_id, 6)) == messages[6:]


async def test_a_record_larger_than_the_page_is_a_page(bus: Bus, request_id: str) -> None:
    log = await LogWriter.open(bus, request_id, 1)
    for _ in range(3):
        await log.tokens(delta(secrets.token_hex(2**16)))
    for start in range(3):
        page = await page_of(bus, request_id, start, 1000)
        assert len(page.records) == 1


async def test_a_page_waits_for_its_turn_before_each_batch(bus: Bus, request_id: str) -> None:
    await write(bus, request_id, 2 * BATCH)
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        num_turns += 1

    page = await read_page(bus, request_id, TEXT, 0, 2**18, count)
    assert page is not None
    assert len(page.records) == 2 * BATCH + 1
    assert num_turns == 3


async def test_a_page_has_a_limited_number_of_records(bus: Bus, request_id: str) -> None:
    log = await LogWriter.open(bus, request_id, 1)
    for _ in range(MAX_RECORDS + 1):
        await log.tokens([])
    page = await page_of(bus, request_id, 0)
    assert (len(page.records), page.next, page.ended) == (MAX_RECORDS, MAX_RECORDS, False)
    assert len((await page_of(bus, request_id, page.next)).records) == 1
