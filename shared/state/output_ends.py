"""List of a request's ended outputs. The stage that completes the list ends the request.

Only a request with several outputs has a list. It is one record, which is replaced with an expected
last sequence: a stage with an old list is refused and reads again. If stages read the logs of the
other outputs instead, two stages that end at the same time could both miss that all have ended.
"""

import asyncio
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.reading import STALE_READ_S
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.encoding import or_none, to_json
from shared.protocol.pipeline import ENDS
from shared.protocol.records import OutputEnds, OutputSummary, Usage

NO_USAGE = Usage(0, 0)

_decode = or_none(msgspec.json.Decoder(OutputEnds).decode)


async def begin(bus: Bus, request_id: str, outputs: list[str]) -> None:
    """Write the list of a request's outputs without any end. Does nothing if it exists."""
    new = OutputEnds(outputs, {})
    try:
        await bus.append(subjects.append(request_id, ENDS), to_json(new), 0)
    except Fenced:
        await _change(bus, request_id, lambda ends: ends or new)


async def expected(bus: Bus, request_id: str) -> list[str]:
    """Return the outputs of a request with several; empty for a request with text alone."""
    ends, _ = await _read(bus, request_id)
    return [] if ends is None else ends.expected


async def add(bus: Bus, request_id: str, output: str, summary: OutputSummary) -> OutputEnds:
    """Add an ended output, and return the list. A second call changes nothing."""

    def with_output(ends: OutputEnds | None) -> OutputEnds:
        assert ends is not None, "the coordinator writes the list before any stage begins"
        return ends if output in ends.ended else replace(ends, ended=ends.ended | {output: summary})

    return await _change(bus, request_id, with_output)


async def has_ended(bus: Bus, request_id: str, output: str) -> bool:
    """Return whether an output is in the list as ended."""
    ends, _ = await _read(bus, request_id)
    return ends is not None and output in ends.ended


def is_complete(ends: OutputEnds) -> bool:
    return ends.ended.keys() >= set(ends.expected)


async def _change(
    bus: Bus, request_id: str, change: Callable[[OutputEnds | None], OutputEnds]
) -> OutputEnds:
    """Replace the list by `change(list)`. The argument is None for a request without a list."""
    while True:
        ends, last_sequence = await _read(bus, request_id)
        changed = change(ends)
        if changed is ends:
            return changed
        try:
            await bus.append(subjects.append(request_id, ENDS), to_json(changed), last_sequence)
            return changed
        except Fenced:
            # A replica that serves reads may lag for a moment.
            await asyncio.sleep(STALE_READ_S)


async def _read(bus: Bus, request_id: str) -> tuple[OutputEnds | None, int]:
    """Return the list, if there is one, and the last sequence of its subject."""
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, ENDS))
    # Any client with access to the bus can publish other bytes here.
    lists = (ends for message in reversed(stored) if (ends := _decode(message.data)) is not None)
    return next(lists, None), stored[-1].sequence if stored else 0
