"""The checks of gateways' clients: a clean history, and one wrong in each possible way."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ops.chaos.checks.checker import check
from ops.chaos.checks.http import answer_of, events_of
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.clients.http_exchange import DONE
from ops.chaos.history import (
    Accepted,
    CancelSent,
    EventReceived,
    Fault,
    Ready,
    RequestSent,
    SessionFailed,
)
from shared.protocol.encoding import to_json
from shared.protocol.records import LogRecord
from tests.chaos.test_checker import FINISH, ID, LOG, edit, failure, make_run, with_final

CREATED_S = 5


def shown(
    log: list[LogRecord] = LOG, start: int = 0, streamed: bool = True
) -> list[tuple[int | None, str]]:
    planned = edit(make_run().planned[ID], http=True, streamed=streamed)
    events = events_of(planned, log, CREATED_S)
    return [(at, to_json(data).decode()) for at, data in events if (at or 0) >= start]


def reading(
    events: list[tuple[int | None, str]], session: int = 1, start: int = 0, done: bool = True
) -> list[Any]:
    ends: list[tuple[int | None, str]] = [(None, DONE)] if done else []
    return [
        RequestSent(1.0, ID, session, start, True),
        Accepted(1.1, ID, session),
        *(EventReceived(1.2, ID, session, at, data) for at, data in [*events, *ends]),
    ]


def whole(log: list[LogRecord] = LOG) -> list[tuple[int | None, str]]:
    planned = edit(make_run().planned[ID], http=True, streamed=False)
    return [(None, json.dumps(data)) for _, data in answer_of(planned, log, CREATED_S)]


def seen(
    *clients: list[Any], behaviour: Any = "plain", streamed: bool = True, **final: Any
) -> RecordedRun:
    run = with_final(make_run(behaviour=behaviour), **{"gateway_records": [ID]} | final)
    planned = {ID: edit(run.planned[ID], http=True, streamed=streamed)}
    return replace(run, planned=planned, clients=[event for part in clients for event in part])


def test_a_clean_history() -> None:
    assert check(seen(reading(shown()))).violations == []


def test_a_client_that_continued_elsewhere() -> None:
    run = seen(reading(shown()[:1], done=False), reading(shown(start=1), 2, start=1))
    assert check(run).violations == []


def test_an_error_in_the_place_of_an_answer() -> None:
    log: list[LogRecord] = [failure("cancelled", 0)]
    events: list[tuple[int | None, str]] = [(None, shown(log)[0][1])]
    run = seen(reading(events), [CancelSent(1.15, ID)], logs={ID: log})
    assert check(run).violations == []


def test_an_answer_that_is_one_whole() -> None:
    assert check(seen(reading(whole()), streamed=False)).violations == []


def test_an_error_in_the_place_of_a_whole_answer() -> None:
    log: list[LogRecord] = [LOG[0], failure("cancelled", 1)]
    run = seen(reading(whole(log)), [CancelSent(1.15, ID)], streamed=False, logs={ID: log})
    assert check(run).violations == []


def test_a_whole_answer_that_is_looked_at_as_a_stream() -> None:
    left = [RequestSent(1.0, ID, 1, 0, True)]
    looking = reading(shown(streamed=False), 2)
    looking[0] = edit(looking[0], publishes=False)
    assert check(seen(left, looking, streamed=False)).violations == []


OTHER = [(at, data.replace('"ab"', '"xy"')) for at, data in shown()]
CANCELLED: list[LogRecord] = [LOG[0], failure("cancelled", 1)]
LATE = [
    CancelSent(1.2, ID, 1),
    EventReceived(9.0, ID, 1, *shown(CANCELLED)[1]),
    EventReceived(9, ID, 1, None, DONE),
]
LEFT = [*reading(shown(CANCELLED)[:1], done=False), *LATE]

WRONG = {
    "a gap": ("I2", seen(reading([shown()[0], shown()[2]]))),
    "a repeat": ("I2", seen(reading([shown()[0], *shown()]))),
    "the beginning once more": (
        "I2",
        seen(reading(shown()[:1], done=False), reading(shown(), 2, start=1)),
    ),
    "an end too early": ("I2", seen(reading(shown()[:2]))),
    "more than there is": ("I2", seen(reading([*shown(), (3, "{}")]))),
    "another text": ("I3", seen(reading(OTHER))),
    "another id": (
        "I2",
        seen(reading([(at, data.replace(ID, "another")) for at, data in shown()])),
    ),
    "never its end": ("I1", seen(reading(shown()[:1], done=False))),
    "an end of which the log does not know": (
        "I1",
        seen(reading(shown()), logs={ID: [*LOG[:2]]}),
    ),
    "asked again in vain": ("I12", seen(reading(shown()), behaviour="resubmit_after")),
    "an error without a reason": (
        "I10",
        seen(
            [RequestSent(0.5, ID, 1, 0, True), SessionFailed(0.6, ID, 1, "500", "")],
            reading(shown(), 2),
        ),
    ),
    "a gateway that did not cancel": ("I1", seen(LEFT, behaviour="cancel", logs={ID: CANCELLED})),
    "another text in a whole answer": (
        "I3",
        seen(
            reading([(None, whole()[0][1].replace('"abc"', '"xyz"'))]),
            streamed=False,
        ),
    ),
    "another usage in a whole answer": (
        "I2",
        seen(
            reading([(None, whole()[0][1].replace(": 3", ": 4"))]),
            streamed=False,
        ),
    ),
    "a whole answer late": (
        "I1",
        seen(
            [RequestSent(1.0, ID, 1, 0, True), Accepted(1.0, ID, 1)],
            [
                EventReceived(14.0, ID, 1, None, whole()[0][1]),
                EventReceived(14.0, ID, 1, None, DONE),
            ],
            streamed=False,
        ),
    ),
    "a note that nobody has made": (
        "I5",
        seen(reading(shown()), gateway_records=[ID, "chatcmpl-1"]),
    ),
    "a note without an end": ("I5", seen(reading(shown()), logs={ID: LOG[:2]})),
    "a note that was lost": ("I12", seen(reading(shown()), gateway_records=[])),
    "cancelled by nobody": ("I10", seen(reading(shown(CANCELLED)), logs={ID: CANCELLED})),
    "a log by another name": ("I5", seen(reading(shown()), logs={ID: LOG, "chatcmpl-1": [FINISH]})),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_violates_its_invariant(name: str) -> None:
    invariant, run = WRONG[name]
    violations = check(run).violations
    assert invariant in {violation.invariant for violation in violations}, violations


@pytest.mark.parametrize(
    ("at", "durable", "excused"),
    [(0.9, False, False), (1.1, False, True), (1.1, True, False), (1.3, False, False)],
)
def test_a_client_that_was_killed_has_closed_its_connections(
    at: float, durable: bool, excused: bool
) -> None:
    run = seen(reading(shown(CANCELLED)), logs={ID: CANCELLED})
    run = replace(
        run,
        planned={ID: edit(run.planned[ID], durable=durable)},
        pool=[Fault(at, "kill", "load", 0, 9)],
    )
    assert excused is not any(violation.invariant == "I10" for violation in check(run).violations)


@pytest.mark.parametrize(("at", "excused"), [(0.5, False), (1.1, True), (2.0, True), (4.0, False)])
def test_a_gateway_that_was_away_does_not_hear_of_its_client(at: float, excused: bool) -> None:
    run = seen(LEFT, behaviour="cancel", logs={ID: CANCELLED})
    run = replace(
        run, pool=[Fault(at, "stop", "gateway", 1, 9), Ready(at + 0.2, "gateway", 1, 9, 0)]
    )
    assert excused is not any(violation.invariant == "I1" for violation in check(run).violations)


@pytest.mark.parametrize(("at", "excused"), [(-14.0, False), (-13.0, True), (0.9, True)])
def test_a_gateway_that_died_with_it_counts_as_reading_it(at: float, excused: bool) -> None:
    before = [RequestSent(at - 0.1, ID, 0, 0, True), SessionFailed(at, ID, 0, "connection", "")]
    run = seen(before, LEFT, behaviour="cancel", logs={ID: CANCELLED})
    violations = check(run).violations
    late = [v for v in violations if "after its cancellation" in v.text]
    assert excused is not any(late)
