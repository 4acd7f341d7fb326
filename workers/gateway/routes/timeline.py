"""Timeline of a request: the stages it has been in, as its client may see them."""

from msgspec import Struct

from shared.state.request_status import RequestStatus


class TimelineEntry(Struct, frozen=True):
    """One stage of a request. Times are Unix milliseconds of one clock, the broker's."""

    stage: str
    worker: str
    attempt: int
    began_ms: float
    ended_ms: float | None
    """null while the request is in this stage, and if it ended elsewhere meanwhile."""


def timeline_of(status: RequestStatus) -> list[TimelineEntry]:
    """Return the stages that a request has left and the one it is in, ordered by time."""
    entries = [
        TimelineEntry(span.stage, span.worker, span.attempt, span.received_ms, span.sent_ms)
        for span in status.path
    ]
    until_ms = max((span.sent_ms for span in status.path), default=0.0)
    # The latest attempt of each stage that has claimed the request since.
    since = {a.stage: a for a in status.attempts if a.began_ms >= until_ms}
    if status.state == "queued" and status.stage is not None:
        since.pop(status.stage, None)
    entries += [
        TimelineEntry(a.stage, a.worker, a.number, a.began_ms, None) for a in since.values()
    ]
    return sorted(entries, key=lambda entry: entry.began_ms)
