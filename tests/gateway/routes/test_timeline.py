"""The way of a request, from what is known of it."""

from shared.protocol.messages import AttemptRecord, StageSpan
from shared.state.request_status import RequestStatus, State
from workers.gateway.routes.timeline import TimelineEntry, way_of

COORDINATOR = StageSpan("coordinator", "c-1", 1, 100.0, 101.0)
RENDERER = StageSpan("renderer", "r-1", 1, 102.0, 110.0)
ENGINE = StageSpan("engine", "e-1", 1, 112.0, 190.0)


def attempt(role: str, number: int, began_ms: float) -> AttemptRecord:
    return AttemptRecord(role, f"{role[0]}-{number}", number, began_ms, 0)


def found(
    state: State, stage: str, path: list[StageSpan], *attempts: AttemptRecord
) -> RequestStatus:
    return RequestStatus("req-1", state, stage, path=path, attempts=list(attempts))


def seen(whereabouts: RequestStatus) -> list[tuple[str, int, bool]]:
    """Stage, attempt and whether it has ended there."""
    stops = way_of(whereabouts)
    return [(stop.stage, stop.attempt, stop.ended_ms is not None) for stop in stops]


def test_a_request_that_waits_is_nowhere() -> None:
    there = found("queued", "renderer", [COORDINATOR])
    assert seen(there) == [("coordinator", 1, True)]
    given_back = found("queued", "renderer", [COORDINATOR], attempt("renderer", 1, 102.0))
    assert seen(given_back) == [("coordinator", 1, True)]


def test_a_request_in_hand_is_with_its_latest_attempt() -> None:
    path = [COORDINATOR, RENDERER]
    attempts = [attempt("renderer", 1, 102.0), attempt("engine", 1, 112.0)]
    there = found("in_hand", "engine", path, *attempts, attempt("engine", 2, 150.0))
    assert way_of(there)[-1] == TimelineEntry("engine", "e-2", 2, 150.0, None)
    assert seen(there)[:2] == [("coordinator", 1, True), ("renderer", 1, True)]


def test_a_request_that_has_ended_is_behind_all_of_its_stages() -> None:
    attempts = [attempt("renderer", 1, 102.0), attempt("engine", 1, 112.0)]
    there = found("finished", "engine", [COORDINATOR, RENDERER, ENGINE], *attempts)
    assert seen(there) == [(s, 1, True) for s in ("coordinator", "renderer", "engine")]


def test_a_cancelled_request_is_where_it_was() -> None:
    attempts = [attempt("renderer", 1, 102.0), attempt("engine", 1, 112.0)]
    assert seen(found("failed", "", [], *attempts)) == [
        ("renderer", 1, False),
        ("engine", 1, False),
    ]
