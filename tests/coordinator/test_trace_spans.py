"""Spans of a request from its attempts and its path, for each way in which attempts end."""

from shared.protocol.messages import AttemptRecord
from shared.protocol.records import ErrorInfo, Failure, Finish, StageSpan, Usage
from shared.protocol.traces import Trace, span_id_of
from workers.coordinator.trace_spans import Ended, Span, batch_context, spans_of

TRACE = Trace("a" * 32, "b" * 16, 1000.0, "c" * 16, is_sampled=True)
ACCEPTED = StageSpan("coordinator", "coordinator-1", 1, 999.0, 1002.0)
RENDERED = StageSpan("renderer", "renderer-1", 1, 1005.0, 1010.0)


def attempt(stage: str, worker: str, number: int, began_ms: float) -> AttemptRecord:
    return AttemptRecord(stage, worker, number, began_ms, 0, model="demo")


def ended(
    last: Finish | Failure, attempts: list[tuple[AttemptRecord, float]], request_id: str = "r"
) -> Ended:
    return Ended(request_id, TRACE, 1, last, 2000.0, 1500.0, False, attempts)


def shown(spans: list[Span]) -> list[tuple[str, float, float, object]]:
    return [(s.name, s.start_ms, s.end_ms, s.attributes.get("pagemill.outcome")) for s in spans]


def test_each_attempt_has_a_span_and_its_queue_another() -> None:
    requeued = attempt("engine", "engine-1", 1, 1020.0)
    again = attempt("engine", "engine-2", 2, 1100.0)
    last = attempt("engine", "engine-3", 4, 1300.0)
    engine = StageSpan("engine", "engine-3", 4, 1290.0, 1900.0)
    finish = Finish(9, 4, Usage(3, 7, 2), 1, [ACCEPTED, RENDERED, engine])
    records = [
        (attempt("coordinator", "coordinator-1", 1, 1000.0), 1001.0),
        (attempt("renderer", "renderer-1", 1, 1006.0), 1007.0),
        (requeued, 1021.0),
        (AttemptRecord("engine", "engine-1", 1, 1020.0, 0, "requeued"), 1050.0),
        (again, 1101.0),
        (last, 1301.0),
    ]
    spans = spans_of(ended(finish, records))
    assert shown(spans) == [
        ("generate_content demo", 1000.0, 2000.0, None),
        # A clock that is late by a millisecond does not lead to a span before the root.
        ("coordinator", 1000.0, 1002.0, "done"),
        ("renderer queue", 1002.0, 1005.0, None),
        ("renderer", 1005.0, 1010.0, "done"),
        ("engine queue", 1010.0, 1020.0, None),
        ("engine", 1020.0, 1050.0, "requeued"),
        ("engine queue", 1050.0, 1100.0, None),
        ("engine", 1100.0, 1290.0, "lost"),
        ("engine", 1290.0, 1900.0, "done"),
    ]
    root, first, second, third = spans[0], *[span for span in spans if span.name == "engine"]
    assert (first.links, second.links, third.links) == (
        [],
        [(TRACE.trace_id, first.span_id)],
        [(TRACE.trace_id, second.span_id)],
    )
    assert (first.error, second.error, root.error) == ("", "lost", "")
    assert {span.parent_id for span in spans[1:]} == {root.span_id}
    assert root.parent_id == TRACE.parent_id
    # A repeated export has the same ids.
    assert [span.span_id for span in spans_of(ended(finish, records))] == [
        span.span_id for span in spans
    ]
    assert len({span.span_id for span in spans}) == len(spans)


def test_a_failed_request_has_its_code_and_a_cancelled_one_ends_its_attempt() -> None:
    error = ErrorInfo("poisoned", "2 workers died", None, "server", False)
    engine = StageSpan("engine", "engine-1", 3, 1020.0, 1900.0)
    root, *_, run = spans_of(ended(Failure(2, 3, error, [ACCEPTED, engine]), []))
    assert (root.error, run.error, run.name) == ("poisoned", "failed", "engine")
    cancelled = ErrorInfo("cancelled", "cancelled on request", None, "client", False)
    running = [(attempt("engine", "engine-1", 1, 1020.0), 1021.0)]
    spans = spans_of(ended(Failure(2, 1, cancelled, []), running))
    assert shown(spans)[-1] == ("engine", 1020.0, 2000.0, "ended")
    refused = spans_of(ended(Failure(0, 1, error, [ACCEPTED]), []))
    assert [span.name for span in refused] == ["generate_content", "coordinator"]


def test_a_line_of_a_batch_has_a_link_to_the_batch() -> None:
    finish = Finish(1, 1, Usage(1, 1), 1, [ACCEPTED])
    root, *_ = spans_of(ended(finish, [], "batch_1~7-1@acme"))
    assert root.links == [batch_context("batch_1@acme")]
    assert root.attributes["pagemill.tenant"] == "acme"
    assert batch_context("batch_1@acme")[1] == span_id_of("batch", "batch_1@acme")
