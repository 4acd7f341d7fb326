"""Gateways' notes of requests, where every gateway finds them."""

import asyncio
from dataclasses import dataclass

from shared import subjects
from shared.bus import Bus
from shared.errors import Fenced
from shared.messages import JobRecord, decode_job_record, to_json

# A replica that answers reads may be a moment behind.
STALE_READ_S = 0.02


@dataclass(frozen=True, slots=True)
class Claim:
    """Somebody answers for a request from now on; of several, the one with the last sequence."""

    record: JobRecord
    """The first of the request's id, which stays."""
    sequence: int


async def put(bus: Bus, request_id: str, record: JobRecord) -> Claim | None:
    """Note `record`, and answer for the request; None if there is a note of it already.

    Raises PayloadTooLarge or Unavailable.
    """
    try:
        return Claim(record, await bus.append(subjects.job(request_id), to_json(record), 0))
    except Fenced:
        # It may be our own, if the ack was lost.
        return None


async def take_over(bus: Bus, request_id: str) -> Claim | None:
    """Answer for a request of which there is a note; None when another did so at that moment, or
    the note is gone. Raises Unavailable."""
    subject = subjects.job(request_id)
    stored = await bus.last(subjects.JOBS_STREAM, subject)
    if stored is not None:
        record = decode_job_record(stored.data)
        try:
            return Claim(record, await bus.append(subject, stored.data, stored.sequence))
        except Fenced:
            await asyncio.sleep(STALE_READ_S)
    return None


async def is_claimed_since(bus: Bus, request_id: str, claim: Claim) -> bool:
    """Whether somebody else has come to answer for it. Raises Unavailable."""
    stored = await bus.last(subjects.JOBS_STREAM, subjects.job(request_id))
    return stored is not None and stored.sequence > claim.sequence


async def get(bus: Bus, request_id: str) -> JobRecord | None:
    """None if there is none, or none any more. Raises Unavailable."""
    stored = await bus.last(subjects.JOBS_STREAM, subjects.job(request_id))
    return None if stored is None else decode_job_record(stored.data)
