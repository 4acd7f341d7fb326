"""Gateways' notes of requests, where every gateway finds them."""

from shared import subjects
from shared.bus import Bus
from shared.errors import Fenced
from shared.messages import JobRecord, decode_job_record, to_json


async def put(bus: Bus, request_id: str, record: JobRecord) -> JobRecord:
    """Note `record`, unless there is one of this id. Returns the first, which stays.

    Raises PayloadTooLarge or Unavailable.
    """
    try:
        await bus.append(subjects.job(request_id), to_json(record), 0)
    except Fenced:
        # Perhaps our own, if the ack was lost.
        return await get(bus, request_id) or record
    return record


async def get(bus: Bus, request_id: str) -> JobRecord | None:
    """None if there is none, or none any more. Raises Unavailable."""
    stored = await bus.last(subjects.JOBS_STREAM, subjects.job(request_id))
    return None if stored is None else decode_job_record(stored.data)
