"""Codes that another stage writes, followed while they grow and until they end."""

import asyncio
import secrets

import pytest

from shared.bus.bus import Bus
from shared.errors import Cancelled
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.records import CodeChunk, OutputEnd, OutputSummary
from shared.protocol.task_messages import RequestTicket, TaskHeader
from shared.stage.inputs import RequestEnded, follow_codes
from shared.state.log_records import is_final
from shared.state.token_log import LogWriter, end_request, last_record
from tests.support.waiting import until


@pytest.fixture
async def header(bus: Bus) -> TaskHeader:
    ticket = RequestTicket(bus.now_ms(), bus.now_ms() + 60_000, 1, "receipt")
    return TaskHeader(f"t-{secrets.token_hex(6)}", "m", "interactive", ticket)


async def collect(bus: Bus, header: TaskHeader, chunks: list[CodeChunk]) -> None:
    async for record in follow_codes(bus, header, "speech"):
        chunks.append(record)


async def until_found(chunks: list[CodeChunk], number: int) -> None:
    await until(lambda: len(chunks) >= number)


async def test_codes_are_followed_from_the_beginning_to_the_end(
    bus: Bus, header: TaskHeader
) -> None:
    log = await LogWriter.open(bus, header.request_id, 1, "speech")
    await log.codes(0, [[1], [2]])
    chunks: list[CodeChunk] = []
    following = asyncio.create_task(collect(bus, header, chunks))
    await until_found(chunks, 1)
    await log.codes(2, [[3]])
    await until_found(chunks, 2)
    assert not following.done()
    await log.end(OutputSummary())
    await following
    assert [(record.position, record.frames) for record in chunks] == [(0, [[1], [2]]), (2, [[3]])]


async def cut(bus: Bus, header: TaskHeader) -> None:
    """Cut the codes, as the beginning of the end of a request."""
    subject = subjects.tokens(header.request_id, "speech")
    last = await bus.read_last(subjects.TOKENS_STREAM, subject)
    assert last is not None
    end = to_json(OutputEnd(1, 1, OutputSummary(), cut=True))
    await bus.append(subjects.append(header.request_id, "speech"), end, last.sequence)


@pytest.mark.parametrize("ends", [True, False])
async def test_codes_that_are_cut_are_left_when_the_request_has_ended(
    bus: Bus, header: TaskHeader, ends: bool
) -> None:
    """Its own log ends last. A stage that left before would keep its task until the ack wait.

    Whoever cuts the codes may die before the end, so nothing waits for it for long.
    """
    log = await LogWriter.open(bus, header.request_id, 1, "speech")
    await log.codes(0, [[1]])
    chunks: list[CodeChunk] = []
    following = asyncio.create_task(collect(bus, header, chunks))
    await until_found(chunks, 1)
    await cut(bus, header)
    if ends:
        await asyncio.wait([following], timeout=0.1)
        assert not following.done()
        await end_request(bus, header.request_id, 1, Cancelled("cancelled"), [])
    with pytest.raises(RequestEnded):
        await following
    assert is_final(await last_record(bus, header.request_id)) == ends
    assert len(chunks) == 1
