"""Inputs of a stage that follows an output of another stage while it grows."""

from collections.abc import AsyncIterator

from shared.bus.bus import Bus
from shared.protocol.records import TokenChunk
from shared.protocol.task_messages import TaskHeader
from shared.state.log_reader import LogReader


class RequestEnded(Exception):
    """The request was ended before the input was complete."""


async def follow_text(bus: Bus, header: TaskHeader) -> AsyncIterator[TokenChunk]:
    """Yield the records of a request's text from its beginning until every choice has ended.

    The record that ends the request comes only after all outputs, so a stage does not wait for it.
    Raises RequestEnded.
    """
    assert header.ticket is not None
    rest_s = max(0.0, (header.ticket.deadline_ms - bus.now_ms()) / 1000)
    open_choices = set(range(header.sampling.n))
    async with LogReader(bus, header.request_id, 0) as reader:
        async for record in reader.records(at_once=True, timeout_s=rest_s):
            if not isinstance(record, TokenChunk):
                raise RequestEnded
            yield record
            open_choices -= {d.index for d in record.choices if d.finish_reason is not None}
            if not open_choices:
                return
