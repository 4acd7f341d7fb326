"""Spans of an ended request, made from its attempts and its path. Pure.

The root span lasts from the acceptance of the request to its last record. Below it, each attempt of
a stage has a span, and a second span for the time in which it was queued. An attempt after the
first one has a link to the attempt before it. Ids are computed from the request and the attempt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from shared.protocol.messages import AttemptRecord
from shared.protocol.names import split_id
from shared.protocol.records import Failure, Finish, StageSpan
from shared.protocol.traces import Trace, batch_of, span_id_of, trace_id_of

PROVIDER = "pagemill"
GENERATE, EMBED = "generate_content", "embeddings"

Value = str | int | float


@dataclass(frozen=True, slots=True)
class Span:
    """A span. Times are Unix milliseconds of the broker's clock."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ms: float
    end_ms: float
    attributes: Mapping[str, Value]
    is_root: bool = False
    events: Sequence[tuple[str, float]] = ()
    links: Sequence[tuple[str, str]] = ()
    """Trace id and span id of each."""
    error: str = ""
    """Code of the error; empty without one."""
    state: str = ""


class Ended(NamedTuple):
    """Data of an ended request."""

    request_id: str
    trace: Trace
    sequence: int
    """Sequence of the message with its trace."""
    last: Finish | Failure
    end_ms: float
    """Time at which its last record was stored."""
    first_ms: float | None
    """Time at which its first record was stored; None if that was the last one."""
    is_embedding: bool
    attempts: Sequence[tuple[AttemptRecord, float]]
    """Records of its attempts, each with the time at which it was stored."""


@dataclass(slots=True)
class _Run:
    """An attempt of a stage."""

    stage: str
    worker: str
    number: int
    start_ms: float
    end_ms: float | None = None
    """None while it is unknown."""
    outcome: str = "ended"
    """`done`, `requeued`, `failed`, `lost` if its worker never reported an end, or `ended` if the
    request ended meanwhile."""
    ids: list[str] = field(default_factory=list)
    """Ids of the span and of the span of the queue."""


def spans_of(ended: Ended) -> list[Span]:
    """Return the spans of a request, the root span first."""
    runs, trace = _runs_of(ended), ended.trace
    for run in runs:
        parts = trace.span_id, run.stage, run.worker, run.number, run.start_ms
        run.ids = [span_id_of(*parts), span_id_of(*parts, "queue")]
    spans = [_root(ended)]
    for run in runs:
        earlier = [other for other in runs if other.stage == run.stage and other is not run]
        earlier = [other for other in earlier if other.start_ms < run.start_ms]
        spans += _spans_of_run(run, earlier[-1:], _queued_ms(run, earlier, runs, trace), trace)
    return spans


def batch_root(batch_id: str, start_ms: float, end_ms: float, status: str) -> Span:
    """Return the span of an ended batch. The spans of the batch's lines have links to it."""
    trace_id, span_id = batch_context(batch_id)
    name, tenant = split_id(batch_id)
    attributes: dict[str, Value] = {"pagemill.batch.id": name, "pagemill.batch.status": status}
    if tenant:
        attributes["pagemill.tenant"] = tenant
    error = status if status == "failed" else ""
    return Span(
        "batch", trace_id, span_id, "", start_ms, end_ms, attributes, is_root=True, error=error
    )


def batch_context(batch_id: str) -> tuple[str, str]:
    """Return the trace id and the span id of a batch. `batch_id` is scoped to its tenant."""
    return trace_id_of(f"batch {batch_id}"), span_id_of("batch", batch_id)


def _root(ended: Ended) -> Span:
    trace, last = ended.trace, ended.last
    model = next((record.model for record, _ in ended.attempts if record.model), "")
    operation = EMBED if ended.is_embedding else GENERATE
    name, tenant = split_id(ended.request_id)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.id": name,
    }
    if tenant:
        attributes["pagemill.tenant"] = tenant
    error = ""
    if isinstance(last, Finish):
        attributes["gen_ai.usage.input_tokens"] = last.usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = last.usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = last.usage.cached_tokens
    else:
        error = last.error.code
    batch = batch_of(ended.request_id)
    return Span(
        name=f"{operation} {model}".rstrip(),
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        start_ms=trace.accepted_ms,
        end_ms=max(ended.end_ms, trace.accepted_ms),
        attributes=attributes,
        is_root=True,
        events=[] if ended.first_ms is None else [("first_token", ended.first_ms)],
        links=[] if batch is None else [batch_context(batch)],
        error=error,
        state=trace.state,
    )


def _spans_of_run(
    run: _Run, previous: Sequence[_Run], queued_ms: float, trace: Trace
) -> Iterable[Span]:
    attributes: dict[str, Value] = {
        "pagemill.stage": run.stage,
        "pagemill.worker": run.worker,
        "pagemill.attempt": run.number,
        "pagemill.outcome": run.outcome,
    }
    span = Span(
        name=run.stage,
        trace_id=trace.trace_id,
        span_id=run.ids[0],
        parent_id=trace.span_id,
        start_ms=run.start_ms,
        end_ms=run.start_ms if run.end_ms is None else max(run.start_ms, run.end_ms),
        attributes=attributes,
        links=[(trace.trace_id, other.ids[0]) for other in previous],
        error=run.outcome if run.outcome in ("failed", "lost") else "",
        state=trace.state,
    )
    if queued_ms < run.start_ms:
        yield replace(
            span,
            name=f"{run.stage} queue",
            span_id=run.ids[1],
            start_ms=queued_ms,
            end_ms=run.start_ms,
            attributes={"pagemill.stage": run.stage},
            links=(),
            error="",
        )
    yield span


def _queued_ms(run: _Run, earlier: Sequence[_Run], runs: Sequence[_Run], trace: Trace) -> float:
    """Return the time since when the task of an attempt was in its queue.

    It is the end of the attempt before, or the end of the stage before.
    """
    if earlier and earlier[-1].outcome == "done":
        return run.start_ms  # Another task of a stage that the request has passed before.
    since = earlier or [other for other in runs if other.outcome == "done"]
    ends = (other.end_ms for other in since if other is not run and other.end_ms is not None)
    return max((end for end in ends if end <= run.start_ms), default=trace.accepted_ms)


def _runs_of(ended: Ended) -> list[_Run]:
    """Return the attempts of all stages in the order of their beginnings."""
    path = {(span.stage, span.worker, span.attempt): span for span in ended.last.path}
    failed = None
    if isinstance(ended.last, Failure):
        failed = ended.last.path[-1] if ended.last.path else None
    else:
        for summary in ended.last.outputs.values():
            path |= {(span.stage, span.worker, span.attempt): span for span in summary.path}
    runs: dict[tuple[str, str, int, float], _Run] = {}
    for record, stored_ms in ended.attempts:
        if record.unread:
            continue
        key = record.stage, record.worker, record.number, record.began_ms
        if (span := path.pop(key[:3], None)) is not None:
            runs[key] = _passed(span, failed)
        elif key not in runs:
            runs[key] = _Run(*key)
        if record.outcome != "open":
            runs[key].end_ms, runs[key].outcome = stored_ms, record.outcome
    # Stages without records of attempts, such as fan-out stages.
    ordered = [*runs.values(), *(_passed(span, failed) for span in path.values())]
    for run in ordered:  # The clocks of workers differ from the broker's by milliseconds.
        run.start_ms = max(run.start_ms, ended.trace.accepted_ms)
    ordered.sort(key=lambda run: (run.stage, run.start_ms))
    for _, group in groupby(ordered, key=lambda run: run.stage):
        _close(list(group), ended.end_ms)
    return sorted(ordered, key=lambda run: run.start_ms)


def _passed(span: StageSpan, failed: StageSpan | None) -> _Run:
    outcome = "failed" if span == failed else "done"
    return _Run(span.stage, span.worker, span.attempt, span.received_ms, span.sent_ms, outcome)


def _close(runs: Sequence[_Run], end_ms: float) -> None:
    """End the attempts of one stage without a reported end at the next attempt, or at the end."""
    for number, run in enumerate(runs):
        if run.end_ms is None and number + 1 < len(runs):
            run.end_ms, run.outcome = runs[number + 1].start_ms, "lost"
        elif run.end_ms is None:
            run.end_ms = end_ms
