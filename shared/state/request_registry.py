"""Records of gateways' requests, in a stream that every gateway reads."""

import asyncio
from collections.abc import Callable

import structlog
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.reading import STALE_READ_S
from shared.errors import DecodeError, Fenced, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import or_none, to_json
from shared.protocol.messages import RequestRecord, decode_job_record
from shared.protocol.requests import tenant_header

# Pauses before each search for heartbeats, which live workers send every second.
SEARCH_PAUSES_S = (0.0, 0.75, 0.75)
# Limit on holders of a request; the latest are stored.
MAX_HOLDERS = 8

_decode = or_none(decode_job_record)
_log = structlog.get_logger()


async def register(bus: Bus, request_id: str, record: RequestRecord, holder: str) -> RequestRecord:
    """Register `holder` as responsible for a request, and return the request's record.

    `record` is stored only if there is none yet. `holder` is a unique name that begins with the
    worker's name and a colon.

    Raises PayloadTooLarge or Unavailable. A stored record that cannot be read raises Unavailable
    too, because the gateway that has written it answers the request.
    """
    while True:
        try:
            registered = replace(record, holders=[holder])
            headers = tenant_header(record.tenant)
            await bus.append(subjects.job(request_id), to_json(registered), 0, headers=headers)
            return record
        except Fenced:
            # The stored record may be this one, if its ack was lost.
            try:
                stored = await _change_holders(
                    bus, request_id, lambda holders: [*holders, holder][-MAX_HOLDERS:]
                )
            except DecodeError as error:
                raise Unavailable(error.message, field="X-Request-Id") from error
            if stored is not None:
                return stored


async def unregister(bus: Bus, request_id: str, holder: str) -> bool:
    """Remove `holder`. Return whether the request has no live holder left.

    Raises DecodeError or Unavailable.
    """
    record = await _change_holders(
        bus, request_id, lambda holders: [other for other in holders if other != holder]
    )
    if record is None or not record.holders:
        return True
    return await _are_dead(bus, {other.partition(":")[0] for other in record.holders})


async def _are_dead(bus: Bus, workers: set[str]) -> bool:
    """Return whether none of the workers has a heartbeat.

    The search is repeated, because a restarted broker has no heartbeats at first.
    """
    for pause_s in SEARCH_PAUSES_S:
        await asyncio.sleep(pause_s)
        living = {beat.worker for beat in await bus.heartbeats.read()}
        if living & workers:
            return False
    return True


async def find(bus: Bus, request_id: str) -> RequestRecord | None:
    """Return the record of a request; None if there is none, or if it has expired.

    Undecodable bytes count as no record, because any client may publish on the bus.

    Raises Unavailable.
    """
    stored = await bus.read_last(subjects.JOBS_STREAM, subjects.job(request_id))
    return None if stored is None else _decode(stored.data)


async def _change_holders(
    bus: Bus, request_id: str, change: Callable[[list[str]], list[str]]
) -> RequestRecord | None:
    """Apply `change` to the holders. Return the new record, or None if there is no record.

    Raises DecodeError for undecodable bytes. They are not replaced, because a newer gateway may
    have written them.
    """
    subject = subjects.job(request_id)
    while (stored := await bus.read_last(subjects.JOBS_STREAM, subject)) is not None:
        record = _decode(stored.data)
        if record is None:
            _log.warning("request_record_undecodable", request_id=request_id)
            raise DecodeError(
                f"the stored record of request {request_id} cannot be read, perhaps because a newer"
                " gateway has written it"
            )
        changed = replace(record, holders=change(record.holders))
        if changed.holders == record.holders:
            return record
        try:
            headers = tenant_header(record.tenant)
            await bus.append(subject, to_json(changed), stored.sequence, headers=headers)
            return changed
        except Fenced:
            await asyncio.sleep(STALE_READ_S)
    return None
