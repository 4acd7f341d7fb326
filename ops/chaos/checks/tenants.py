"""Invariant I17: no tenant learns anything of another's requests."""

from collections.abc import Iterator

from ops.chaos.checks.batches import owner_of_line
from ops.chaos.checks.recorded_run import RecordedRun, Violation
from ops.chaos.history import Overheard, Peeked

# Requests of the deployment itself, with the key of one tenant.
WARM = "warm-"
# A gateway does not have the request, or the broker does not answer it.
REFUSALS = (404, 503)


def find(run: RecordedRun) -> Iterator[Violation]:
    """Yield records on the bus and answers of gateways that reached another tenant."""
    for event in run.clients:
        if isinstance(event, Overheard):
            if event.id.startswith(WARM):
                continue
            planned = run.planned.get(event.id)
            owner = owner_of_line(run, event.id) if planned is None else planned.tenant
            if owner != event.tenant:
                text = f"{event.tenant} received record {event.record.index} of its log"
                yield Violation("I17", event.id, text)
        elif isinstance(event, Peeked) and event.status not in REFUSALS:
            text = f"{event.tenant} requested it, and was answered with {event.status}"
            yield Violation("I17", event.id, text)
