"""Gateways' notes of requests, where every gateway finds them."""

import asyncio
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat, RequestRecord, decode_job_record, to_json

# A replica that answers reads may be a moment behind.
STALE_READ_S = 0.02
# Whoever lives is heard of every second.
LOOKS_S = (0.0, 0.75, 0.75)
# Of those who have come again and again, the last.
MAX_HOLDERS = 8

_heartbeat = msgspec.json.Decoder(Heartbeat)


async def register(bus: Bus, request_id: str, record: RequestRecord, holder: str) -> RequestRecord:
    """Answer for a request, of which `record` is noted unless there is a note of it: the first
    stays. `holder` is a name that nobody else has, and begins with that of the worker and a colon.

    Raises PayloadTooLarge or Unavailable.
    """
    while True:
        try:
            noted = replace(record, holders=[holder])
            await bus.append(subjects.job(request_id), to_json(noted), 0)
            return record
        except Fenced:
            # It may be our own, if the ack was lost.
            held = await _change(bus, request_id, lambda known: [*known, holder][-MAX_HOLDERS:])
            if held is not None:
                return held


async def unregister(bus: Bus, request_id: str, holder: str) -> bool:
    """Whether nobody alive answers for the request any more. Raises Unavailable."""
    left = await _change(bus, request_id, lambda known: [h for h in known if h != holder])
    if left is None or not left.holders:
        return True
    return await _are_gone(bus, {other.partition(":")[0] for other in left.holders})


async def _are_gone(bus: Bus, workers: set[str]) -> bool:
    """Whether none of them is heard of, nor will be soon: a broker that has just come back has not
    heard of anybody yet."""
    for pause_s in LOOKS_S:
        await asyncio.sleep(pause_s)
        living = {_heartbeat.decode(data).worker for data in await bus.read_heartbeats()}
        if living & workers:
            return False
    return True


async def find(bus: Bus, request_id: str) -> RequestRecord | None:
    """None if there is none, or none any more. Raises Unavailable."""
    stored = await bus.read_last(subjects.JOBS_STREAM, subjects.job(request_id))
    return None if stored is None else decode_job_record(stored.data)


async def _change(
    bus: Bus, request_id: str, change: Callable[[list[str]], list[str]]
) -> RequestRecord | None:
    """With other holders; None if there is no note."""
    subject = subjects.job(request_id)
    while (stored := await bus.read_last(subjects.JOBS_STREAM, subject)) is not None:
        known = decode_job_record(stored.data)
        changed = replace(known, holders=change(known.holders))
        if changed.holders == known.holders:
            return known
        try:
            await bus.append(subject, to_json(changed), stored.sequence)
            return changed
        except Fenced:
            await asyncio.sleep(STALE_READ_S)
    return None
