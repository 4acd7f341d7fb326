"""Inputs of a stage that follows an output of another stage while it grows.

Every attempt reads its inputs from the beginning, and needs no state of an earlier attempt.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from shared.bus.bus import Bus
from shared.bus.reading import STALE_READ_S
from shared.protocol.records import AnyRecord, CodeChunk, OutputEnd, TokenChunk
from shared.protocol.task_messages import TaskHeader
from shared.state.log_reader import LogReader
from shared.state.log_records import is_final
from shared.state.token_log import last_record

MAX_LOOKS = 20


class RequestEnded(Exception):
    """Raised when the request was ended before the input was complete."""


async def follow_text(bus: Bus, header: TaskHeader) -> AsyncIterator[TokenChunk]:
    """Yield the records of a request's text from its beginning until every choice has ended.

    The record that ends the request comes only after all outputs, so a stage does not wait for it.
    Raises RequestEnded.
    """
    open_choices = set(range(header.sampling.n))
    async with LogReader(bus, header.request_id, 0) as reader:
        async for record in _records(reader, bus, header):
            if not isinstance(record, TokenChunk):
                raise RequestEnded
            yield record
            open_choices -= {d.index for d in record.choices if d.finish_reason is not None}
            if not open_choices:
                return


async def follow_codes(
    bus: Bus, header: TaskHeader, output: str
) -> AsyncGenerator[CodeChunk, None]:
    """Yield the codes of an output from their beginning to their end. Raises RequestEnded."""
    async with LogReader(bus, header.request_id, 0, output) as reader:
        async for record in _records(reader, bus, header):
            if isinstance(record, OutputEnd) and record.cut:
                await _await_end(bus, header.request_id)
                raise RequestEnded
            if isinstance(record, CodeChunk):
                yield record


async def _await_end(bus: Bus, request_id: str) -> None:
    """Wait for the record that ends a request. It is written after the records that cut outputs.

    The worker that writes them may die in between, so the wait is short.
    """
    for _ in range(MAX_LOOKS):
        if is_final(await last_record(bus, request_id)):
            return
        await asyncio.sleep(STALE_READ_S)


def _records(reader: LogReader, bus: Bus, header: TaskHeader) -> AsyncIterator[AnyRecord]:
    """Yield the records of a log, stored and new ones, until the deadline of the request."""
    assert header.ticket is not None
    rest_s = max(0.0, (header.ticket.deadline_ms - bus.now_ms()) / 1000)
    return reader.records(at_once=True, timeout_s=rest_s)
