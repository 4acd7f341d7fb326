"""The token log on a real server: fencing, resume, and readers that get each record once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.client import ask, follow, follow_output
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import ContextTooLong, Fenced, LogTruncated
from shared.protocol import subjects
from shared.protocol.records import ChoiceDelta, Failure, Finish, OutputSummary, TokenChunk, Usage
from shared.protocol.requests import GenerateRequest, Message
from shared.state import log_reader
from shared.state.log_reader import LogReader
from shared.state.log_records import decode_record
from shared.state.token_log import LogWriter, end_request, finish_request, last_record
from tests.support.broker import subscriptions_of


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


async def test_a_reader_with_the_last_record_has_no_subscription(bus: Bus, request_id: str) -> None:
    await end_request(bus, request_id, 1, ContextTooLong("too long"), [])
    before = subscriptions_of(bus)
    log = follow(bus, request_id)
    assert isinstance(await anext(log), Failure)
    assert subscriptions_of(bus) == before
    assert [record async for record in log] == []


@pytest.mark.parametrize("output", ["text", "audio"])
async def test_a_log_without_a_record_at_its_deadline_was_removed(
    bus: Bus, request_id: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "GRACE_S", 0.0)
    log: AsyncIterator[object] = follow(bus, request_id, timeout_s=0.0)
    if output != "text":
        log = follow_output(bus, request_id, output, timeout_s=0.0)
    with pytest.raises(LogTruncated):
        await anext(log)


async def test_live_readers_never_see_a_refused_record(bus: Bus, request_id: str) -> None:
    listener = await bus.subscribe(subjects.tokens(request_id))
    zombie = await LogWriter.open(bus, request_id, attempt=1)
    successor = await LogWriter.open(bus, request_id, attempt=2)
    await successor.tokens(delta(0))
    with pytest.raises(Fenced):
        await zombie.tokens(delta(0))
    await successor.tokens(delta(1))
    records = []
    while (message := await listener.next(0.3)) is not None:
        record = decode_record(message.data)
        assert record is not None
        records.append(record)
    await bus.unsubscribe(listener)
    assert [(record.index, record.attempt) for record in records] == [(0, 2), (1, 2)]


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


def lose_unread(reader: LogReader) -> None:
    """Remove the records that the reader has received and not read, and wake it."""
    live: Any = reader._live
    unread = live._unread
    while not unread.empty():
        unread.get_nowait()
    live.wake()


async def test_a_reader_continues_when_logs_in_memory_are_lost(
    own_broker: EmbeddedServer, request_id: str
) -> None:
    """It reads the new log from the position at which it has stopped in the lost log."""
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig(token_log_storage="memory"))
    for position in range(8):
        other = await LogWriter.open(bus, "other", attempt=1)
        await other.tokens(delta(position))
    lost = await LogWriter.open(bus, request_id, attempt=1)
    await lost.tokens(delta(0))
    async with asyncio.timeout(30), LogReader(bus, request_id, 0) as reader:
        records = reader.records(at_once=True, timeout_s=None)
        read = [await anext(records)]
        own_broker.stop()
        own_broker.start()
        again = await LogWriter.open(bus, request_id, attempt=2)
        await again.tokens(delta(0))
        await again.tokens(delta(1))
        await again.finish(OutputSummary(Usage(1, 2), 1), {})
        lose_unread(reader)
        read += [record async for record in records]
    assert [record.index for record in read] == [0, 1, 2]
    await bus.close()


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_log_in_memory_may_end_with_fewer_records_than_were_read_before_its_loss(
    own_broker: EmbeddedServer, request_id: str, is_live: bool
) -> None:
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig(token_log_storage="memory"))
    lost = await LogWriter.open(bus, request_id, attempt=1)
    for position in range(4):
        await lost.tokens(delta(position))
    async with asyncio.timeout(30), LogReader(bus, request_id, 0) as reader:
        records = reader.records(at_once=True, timeout_s=None)
        for _ in range(4):
            await anext(records)
        own_broker.stop()
        own_broker.start()
        again = await LogWriter.open(bus, request_id, attempt=2)
        await again.tokens([*delta(0), *delta(1), *delta(2), *delta(3)])
        await again.finish(OutputSummary(Usage(1, 4), 1), {})
        if not is_live:
            lose_unread(reader)
        assert [type(record) async for record in records] == [Finish]
    await bus.close()


async def test_attempts_in_a_log_only_rise(bus: Bus, request_id: str) -> None:
    before = await LogWriter.open(bus, request_id, attempt=3)
    await before.tokens([ChoiceDelta(0, 0, [1], "a")])
    made_again = await LogWriter.open(bus, request_id, attempt=1)
    await made_again.tokens([ChoiceDelta(0, 1, [2], "b")])
    assert [record.attempt for record in await read_log(bus, request_id)] == [3, 4]


FOREIGN = b"\xff\x00 no record"
LATER_KIND = b'{"type":"a later kind","index":1,"attempt":1}'


async def publish_foreign(bus: Bus, request_id: str, data: bytes = FOREIGN) -> None:
    await bus.publish_without_id(subjects.append(request_id), data)


@pytest.mark.parametrize(
    "data", [FOREIGN, b"", b"null", b"[]", b'{"type":"tokens"}', b'{"type":"x","index":-']
)
async def test_a_writer_continues_after_foreign_bytes(
    bus: Bus, request_id: str, data: bytes
) -> None:
    log = await LogWriter.open(bus, request_id, attempt=1)
    await publish_foreign(bus, request_id, data)
    await log.tokens(delta(0))
    await publish_foreign(bus, request_id, data)
    await publish_foreign(bus, request_id, data)
    await log.tokens(delta(1))
    successor = await LogWriter.open(bus, request_id, attempt=2)
    assert [record.index for record in successor.records] == [0, 1]
    await successor.finish(OutputSummary(Usage(1, 2), 1), {})
    assert [record.index for record in await read_log(bus, request_id)] == [0, 1, 2]


async def test_a_zombie_is_refused_after_foreign_bytes(bus: Bus, request_id: str) -> None:
    zombie = await LogWriter.open(bus, request_id, attempt=1)
    successor = await LogWriter.open(bus, request_id, attempt=2)
    await publish_foreign(bus, request_id)
    await successor.tokens(delta(0))
    await publish_foreign(bus, request_id)
    with pytest.raises(Fenced):
        await zombie.tokens(delta(0))


async def test_a_reader_skips_foreign_bytes_and_unknown_kinds(bus: Bus, request_id: str) -> None:
    log = await LogWriter.open(bus, request_id, attempt=1)
    await log.tokens(delta(0))
    await publish_foreign(bus, request_id, LATER_KIND)
    await publish_foreign(bus, request_id)
    live = follow(bus, request_id)
    first = await anext(live)
    successor = await LogWriter.open(bus, request_id, attempt=2)
    await successor.tokens(delta(1))
    await publish_foreign(bus, request_id)
    await publish_foreign(bus, request_id, LATER_KIND.replace(b"1,", b"3,", 1))
    successor = await LogWriter.open(bus, request_id, attempt=3)
    await successor.finish(OutputSummary(Usage(1, 2), 1), {})
    rest = [record async for record in live]
    assert [record.index for record in (first, *rest)] == [0, 2, 4]
    assert [record.index async for record in follow(bus, request_id)] == [0, 2, 4]
    assert [record.index async for record in follow(bus, request_id, 3)] == [4]


@pytest.mark.parametrize("index", [-1, 0, 2, 10**30])
async def test_an_unknown_kind_that_does_not_continue_the_log_is_no_record(
    bus: Bus, request_id: str, index: int
) -> None:
    data = LATER_KIND.replace(b"1,", b"%d," % index, 1)
    log = await LogWriter.open(bus, request_id, attempt=1)
    await log.tokens(delta(0))
    await publish_foreign(bus, request_id, data)
    live = follow(bus, request_id)
    first = await anext(live)
    await log.tokens(delta(1))
    successor = await LogWriter.open(bus, request_id, attempt=2)
    await successor.tokens(delta(2))
    await end_request(bus, request_id, 1, ContextTooLong("too long"), [])
    await publish_foreign(bus, request_id, data)
    rest = [record async for record in live]
    assert [record.index for record in (first, *rest)] == [0, 1, 2, 3]
    for start in range(4):
        read = [record.index async for record in follow(bus, request_id, start)]
        assert read == list(range(start, 4))
    assert isinstance(await last_record(bus, request_id), Failure)


async def test_a_record_of_an_unknown_kind_fences_the_writer(bus: Bus, request_id: str) -> None:
    log = await LogWriter.open(bus, request_id, attempt=1)
    await log.tokens(delta(0))
    await publish_foreign(bus, request_id, LATER_KIND)
    with pytest.raises(Fenced):
        await log.tokens(delta(1))


@pytest.mark.parametrize("data", [FOREIGN, LATER_KIND])
async def test_the_last_record_is_found_under_other_bytes(
    bus: Bus, request_id: str, data: bytes
) -> None:
    await publish_foreign(bus, request_id)
    assert await last_record(bus, request_id) is None
    log = await LogWriter.open(bus, request_id, attempt=1)
    await log.tokens(delta(0))
    await publish_foreign(bus, request_id, data)
    record = await last_record(bus, request_id)
    assert isinstance(record, TokenChunk)
    assert record.index == 0


@pytest.mark.parametrize(("data", "index"), [(FOREIGN, 1), (LATER_KIND, 2)])
async def test_a_request_ends_once_after_foreign_bytes(
    bus: Bus, request_id: str, data: bytes, index: int
) -> None:
    failed, finished = request_id, f"{request_id}-2"
    for name in (failed, finished):
        log = await LogWriter.open(bus, name, attempt=1)
        await log.tokens(delta(0))
        await publish_foreign(bus, name, data)
    for _ in range(2):
        await end_request(bus, failed, 1, ContextTooLong("too long"), [])
        await finish_request(bus, finished, 1, {"text": OutputSummary(Usage(1, 1), 1)})
        for name in (failed, finished):
            await publish_foreign(bus, name)
    _, failure = await read_log(bus, failed)
    _, finish = await read_log(bus, finished)
    assert isinstance(failure, Failure)
    assert isinstance(finish, Finish)
    assert (failure.index, finish.index) == (index, index)


async def test_an_embedding_is_written_once(bus: Bus, request_id: str) -> None:
    """An attempt that died before the final record has left the embedding."""
    first = await LogWriter.open(bus, request_id, attempt=1)
    await first.embedding("AAAAAA==")
    second = await LogWriter.open(bus, request_id, attempt=2)
    await second.embedding("AAAAAA==")
    await second.finish(OutputSummary(Usage(3, 0), 1), {})
    chunk, end = await read_log(bus, request_id)
    assert isinstance(chunk, TokenChunk)
    assert (chunk.attempt, chunk.choices, chunk.embedding) == (1, [], "AAAAAA==")
    assert isinstance(end, Finish)
    assert (end.index, end.attempt, end.usage) == (1, 2, Usage(3, 0))
