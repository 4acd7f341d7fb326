"""Reason why a request's tasks were not processed: they wait for a worker of a newer version."""

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.messages import decode_attempt


async def why_unread(bus: Bus, request_id: str) -> str | None:
    """Return why the workers could not read a task of the request; None if each was read.

    Raises Unavailable.
    """
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    records = (decode_attempt(message.data) for message in stored)
    latest = {record.stage: record for record in records if record is not None}
    unread = [record for record in latest.values() if record.unread]
    return f"{unread[-1].stage}: {unread[-1].unread}" if unread else None
