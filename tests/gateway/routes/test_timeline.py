"""The timeline of a request, from its status."""

from shared.protocol.reading import Attempt, RequestStatus, State
from shared.protocol.records import StageSpan
from workers.gateway.routes.requests import TimelineEntry, timeline_of

COORDINATOR = StageSpan("coordinator", "c-1", 1, 100.0, 101.0)
RENDERER = StageSpan("renderer", "r-1", 1, 102.0, 110.0)
ENGINE = StageSpan("engine", "e-1", 1, 112.0, 190.0)


def attempt(role: str, number: int, began_ms: float) -> Attempt:
    return Attempt(role, f"{role[0]}-{number}", number, began_ms, 0)


def status(state: State, stage: str, path: list[StageSpan], *attempts: Attempt) -> RequestStatus:
    return RequestStatus("req-1", state, stage=stage, path=path, attempts=list(attempts))


def seen(status: RequestStatus) -> list[tuple[str, int, bool]]:
    """Return the stage and attempt of each entry, and whether it ended there."""
    entries = timeline_of(status)
    return [(entry.stage, entry.attempt, entry.ended_ms is not None) for entry in entries]


def test_a_queued_request_is_in_no_stage() -> None:
    queued = status("queued", "renderer", [COORDINATOR])
    assert seen(queued) == [("coordinator", 1, True)]
    requeued = status("queued", "renderer", [COORDINATOR], attempt("renderer", 1, 102.0))
    assert seen(requeued) == [("coordinator", 1, True)]


def test_a_claimed_request_is_shown_with_its_latest_attempt() -> None:
    path = [COORDINATOR, RENDERER]
    attempts = [attempt("renderer", 1, 102.0), attempt("engine", 1, 112.0)]
    claimed = status("running", "engine", path, *attempts, attempt("engine", 2, 150.0))
    assert timeline_of(claimed)[-1] == TimelineEntry("engine", "e-2", 2, 150.0, None)
    assert seen(claimed)[:2] == [("coordinator", 1, True), ("renderer", 1, True)]


def test_a_finished_request_has_left_all_of_its_stages() -> None:
    attempts = [attempt("renderer", 1, 102.0), attempt("engine", 1, 112.0)]
    finished = status("finished", "engine", [COORDINATOR, RENDERER, ENGINE], *attempts)
    assert seen(finished) == [(s, 1, True) for s in ("coordinator", "renderer", "engine")]


def test_a_cancelled_request_stays_in_the_stages_that_had_claimed_it() -> None:
    attempts = [attempt("renderer", 1, 102.0), attempt("engine", 1, 112.0)]
    assert seen(status("failed", "", [], *attempts)) == [
        ("renderer", 1, False),
        ("engine", 1, False),
    ]
