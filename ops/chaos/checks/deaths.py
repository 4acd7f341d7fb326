"""Deaths of workers that held a request, as the journals of the processes have them."""

from collections import Counter

from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.history import AnyEvent, ProcessExited, WorkerEvent
from ops.chaos.plan import Planned


def count_deaths(run: RecordedRun, planned: Planned) -> int:
    """Return how many workers of one role died with the request in hand and added nothing to it."""
    died = {
        (event.role, event.pid)
        for event in run.pool
        if isinstance(event, ProcessExited) and event.code != 0
    }
    roles = Counter(
        role
        for (role, pid), events in run.processes.items()
        if (role, pid) in died and _ends_in_hand(events, planned.bus_id)
    )
    return max(roles.values(), default=0)


def _ends_in_hand(events: list[AnyEvent], id: str) -> bool:
    held = False
    for event in events:
        if not isinstance(event, WorkerEvent) or event.id != id:
            continue
        if event.what == "received":
            held = True
        elif event.what in ("acked", "requeued", "appended"):
            held = False
    return held
