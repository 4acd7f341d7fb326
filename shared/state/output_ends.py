"""The list of a request's outputs that have ended: the stage that completes it ends the request.

Only a request with several outputs has a list. It is one record that is replaced under a fence
(expected last sequence), which makes it a counter: a stage that read an old list is refused and
reads again. Looking at the logs of the other outputs instead loses the end when two stages look at
the same time.
"""

import asyncio
from typing import NamedTuple

import msgspec

from shared.bus.bus import Bus
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.encoding import or_none, to_json
from shared.protocol.pipeline import ENDS
from shared.protocol.records import OutputEnds, OutputSummary, Usage

NO_USAGE = Usage(0, 0)
STALE_READ_S = 0.02

_decode = or_none(msgspec.json.Decoder(OutputEnds).decode)


class _Stored(NamedTuple):
    ends: OutputEnds | None
    """The list; None while the request has none."""
    last_sequence: int


async def begin(bus: Bus, request_id: str, outputs: list[str]) -> None:
    """Write the list of a request's outputs, none of which has ended. Does nothing if it exists."""
    stored = await _read(bus, request_id)
    while stored.ends is None:
        if await _replace(bus, request_id, OutputEnds(outputs, {}), stored.last_sequence):
            return
        stored = await _read(bus, request_id)


async def expected(bus: Bus, request_id: str) -> list[str]:
    """The outputs of a request that has several; empty for a request that has its text alone."""
    ends = (await _read(bus, request_id)).ends
    return [] if ends is None else ends.expected


async def add(bus: Bus, request_id: str, output: str, summary: OutputSummary) -> OutputEnds:
    """Note that an output has ended, and return the list; does nothing the second time."""
    while True:
        ends, last_sequence = await _read(bus, request_id)
        assert ends is not None, "the coordinator writes the list before any stage begins"
        if output in ends.ended:
            return ends
        longer = OutputEnds(ends.expected, ends.ended | {output: summary})
        if await _replace(bus, request_id, longer, last_sequence):
            return longer


def is_complete(ends: OutputEnds) -> bool:
    return ends.ended.keys() >= set(ends.expected)


async def _read(bus: Bus, request_id: str) -> _Stored:
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, ENDS))
    last_sequence = stored[-1].sequence if stored else 0
    for message in reversed(stored):
        if (ends := _decode(message.data)) is not None:
            return _Stored(ends, last_sequence)
    return _Stored(None, last_sequence)


async def _replace(bus: Bus, request_id: str, ends: OutputEnds, last_sequence: int) -> bool:
    try:
        await bus.append(subjects.append(request_id, ENDS), to_json(ends), last_sequence)
    except Fenced:
        # A replica that answers reads may be a moment behind.
        await asyncio.sleep(STALE_READ_S)
        return False
    return True
