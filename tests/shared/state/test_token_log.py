"""The token log against a real server: fencing, resume, and readers who see each record once."""

import asyncio
import secrets

import pytest

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.client import ask, follow
from shared.errors import ContextTooLong, Fenced
from shared.protocol import subjects
from shared.protocol.messages import (
    ChoiceDelta,
    Failure,
    Finish,
    GenerateRequest,
    Message,
    OutputSummary,
    TokenChunk,
    Usage,
)
from shared.state.token_log import LogWriter, decode_record, end_request


@pytest.fixture
def request_id() -> str:
    return f"t-{secrets.token_hex(6)}"


def delta(position: int) -> list[ChoiceDelta]:
    return [ChoiceDelta(index=0, position=position, token_ids=[position], text=f"{position} ")]


async def test_a_log_is_read_as_it_was_written(bus: Bus, request_id: str) -> None:
    log = await LogWriter.open(bus, request_id, attempt=1)
    for position in range(600):
        await log.tokens(delta(position))
    await log.finish(OutputSummary(Usage(1, 600), 3), {})
    records = await read_log(bus, request_id)
    assert [record.index for record in records] == list(range(601))
    assert isinstance(records[-1], Finish)


async def test_a_writer_that_was_overtaken_is_refused(bus: Bus, request_id: str) -> None:
    zombie = await LogWriter.open(bus, request_id, attempt=1)
    await zombie.tokens(delta(0))
    successor = await LogWriter.open(bus, request_id, attempt=2)
    assert len(successor.records) == 1
    await successor.tokens(delta(1))
    with pytest.raises(Fenced):
        await zombie.tokens(delta(1))
    await successor.finish(OutputSummary(Usage(1, 2), 1), {})
    with pytest.raises(Fenced):
        await zombie.finish(OutputSummary(Usage(1, 2), 1), {})
    assert [record.index for record in await read_log(bus, request_id)] == [0, 1, 2]


async def test_who_has_the_last_record_listens_no_more(bus: Bus, request_id: str) -> None:
    await end_request(bus, request_id, 1, ContextTooLong("too long"), [])
    before = set(bus._nc._subs)
    log = follow(bus, request_id)
    assert isinstance(await anext(log), Failure)
    assert set(bus._nc._subs) == before
    assert [record async for record in log] == []


async def test_live_readers_never_see_a_refused_record(bus: Bus, request_id: str) -> None:
    listener = await bus.subscribe(subjects.tokens(request_id))
    zombie = await LogWriter.open(bus, request_id, attempt=1)
    successor = await LogWriter.open(bus, request_id, attempt=2)
    await successor.tokens(delta(0))
    with pytest.raises(Fenced):
        await zombie.tokens(delta(0))
    await successor.tokens(delta(1))
    seen = []
    while (message := await listener.next(0.3)) is not None:
        seen.append(decode_record(message.data))
    await bus.unsubscribe(listener)
    assert [(record.index, record.attempt) for record in seen] == [(0, 2), (1, 2)]


async def test_an_append_whose_ack_was_lost_is_recognised_as_our_own(
    bus: Bus, request_id: str
) -> None:
    log = await LogWriter.open(bus, request_id, attempt=1)
    twin = await LogWriter.open(bus, request_id, attempt=1)
    await twin.tokens(delta(0))
    # The same worker repeats the append, not knowing that the first one arrived.
    await log.tokens(delta(0))
    await log.tokens(delta(1))
    assert [record.index for record in await read_log(bus, request_id)] == [0, 1]


async def test_a_closed_log_is_not_failed_again(bus: Bus, request_id: str) -> None:
    await end_request(bus, request_id, 1, ContextTooLong("too long", field="messages"), [])
    await end_request(bus, request_id, 2, ContextTooLong("too long", field="messages"), [])
    records = await read_log(bus, request_id)
    assert len(records) == 1
    assert isinstance(records[0], Failure)


async def test_a_reader_fills_gaps_from_the_log(bus: Bus, request_id: str) -> None:
    """Records from before the reader came are read from the stream, later ones live."""
    log = await LogWriter.open(bus, request_id, attempt=1)
    await log.tokens(delta(0))
    await log.tokens(delta(1))
    request = GenerateRequest("nobody", [Message("user", "hello")])

    async def write_the_rest() -> None:
        await asyncio.sleep(0.2)
        await log.tokens(delta(2))
        await log.finish(OutputSummary(Usage(1, 3), 1), {})

    writer = asyncio.create_task(write_the_rest())
    records = [record async for record in ask(bus, request, request_id)]
    await writer
    assert [record.index for record in records] == [0, 1, 2, 3]
    assert isinstance(records[0], TokenChunk)


async def test_attempts_in_a_log_only_rise(bus: Bus, request_id: str) -> None:
    before = await LogWriter.open(bus, request_id, attempt=3)
    await before.tokens([ChoiceDelta(0, 0, [1], "a")])
    made_again = await LogWriter.open(bus, request_id, attempt=1)
    await made_again.tokens([ChoiceDelta(0, 1, [2], "b")])
    assert [record.attempt for record in await read_log(bus, request_id)] == [3, 4]
