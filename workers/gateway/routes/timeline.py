"""A request's way through the stages, as its client may see it."""

from msgspec import Struct

from shared.state.request_status import RequestStatus


class TimelineEntry(Struct, frozen=True):
    """One stage of it. Times are Unix milliseconds of one clock, the broker's."""

    stage: str
    worker: str
    attempt: int
    began_ms: float
    ended_ms: float | None
    """null while it is there, and where it was when something else ended it."""


def timeline_of(found: RequestStatus) -> list[TimelineEntry]:
    """In the order of time: what it has behind it, and where it is."""
    stops = [
        TimelineEntry(h.role, h.worker, h.attempt, h.received_ms, h.sent_ms) for h in found.path
    ]
    until_ms = max((hop.sent_ms for hop in found.path), default=0.0)
    # Of each stage that has had it since, the latest attempt.
    since = {a.role: a for a in found.attempts if a.began_ms >= until_ms}
    if found.state == "queued" and found.stage is not None:
        since.pop(found.stage, None)
    stops += [TimelineEntry(a.role, a.worker, a.number, a.began_ms, None) for a in since.values()]
    return sorted(stops, key=lambda stop: stop.began_ms)
