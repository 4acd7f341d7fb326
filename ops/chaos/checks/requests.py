"""Invariants I1 to I4, I10 to I12 and I14: each request's log, and what its clients received."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ops.chaos import fake_model
from ops.chaos.checks.recorded_run import RecordedRun, Violation
from ops.chaos.expected_answers import Expected
from ops.chaos.history import Event, Fault, ProcessExited, WorkerEvent
from ops.chaos.plan import Planned
from shared.bus.streams import HEARTBEAT_TTL_S
from shared.protocol.records import Failure, Finish, LogRecord, TokenChunk
from shared.state.log_records import is_final

# Broker and client share the clock of one machine; a timer may fire a little early.
CLOCK_SLACK_S = 0.15

_LEAKS = re.compile(r"Traceback|0x[0-9a-f]{6}|(?:^|\s)/(?:\w+/)+\w+|File \"")


def find(run: RecordedRun) -> Iterator[Violation]:
    """Yield the violations of all planned requests, and logs that have no request."""
    for planned in run.planned.values():
        if planned.http and planned.speaks:
            continue  # Gateways make the ids of speeches; see `speech`.
        for invariant, check in CHECKS:
            for text in check(run, planned):
                yield Violation(invariant, planned.id, text)
    for id in run.final.logs.keys() - run.planned.keys():
        yield Violation("I5", id, "a log of a request that no client has sent")


def _log(run: RecordedRun, planned: Planned) -> list[LogRecord]:
    return run.final.logs.get(planned.id, [])


def _end(run: RecordedRun, planned: Planned) -> LogRecord | None:
    log = _log(run, planned)
    return log[-1] if log and is_final(log[-1]) else None


# -- I1: an accepted request is answered in time ----------------------------------------------


def check_answered(run: RecordedRun, planned: Planned) -> Iterator[str]:
    accepted = run.accepted.get(planned.id)
    if accepted is None:
        if not run.session_failures.get(planned.id):
            yield "neither accepted nor refused: its client never got an answer"
        return
    if _end(run, planned) is None:
        yield f"accepted, but its log of {len(_log(run, planned))} records has no end"
    if planned.id not in run.ends:
        yield "accepted, but no client ever saw its end"
        return
    late_s = _late_s(run, planned.id, accepted + planned.timeout_s)
    if late_s > run.bounds.after_deadline_s:
        yield f"ended {late_s:.2f} s after its deadline"


def check_cancelled(run: RecordedRun, planned: Planned) -> Iterator[str]:
    cancel = run.cancelled.get(planned.id)
    if cancel is None or planned.id not in run.ends:
        return
    late_s = _late_s(run, planned.id, cancel.t)
    if cancel.gateway is not None and run.gateway_failed(
        cancel.gateway, cancel.t, cancel.t + run.bounds.after_cancel_s
    ):
        return  # The cancellation may never have reached the gateway.
    if cancel.gateway is not None and any(
        cancel.t - HEARTBEAT_TTL_S < failed.t < cancel.t
        for failed in run.session_failures.get(planned.id, [])
    ):
        # Until its heartbeat lapses, a dead gateway counts as a reader of the request.
        return
    if late_s > run.bounds.after_cancel_s:
        yield f"ended {late_s:.2f} s after its cancellation"


def _late_s(run: RecordedRun, id: str, due: float) -> float:
    """Return the delay of an end without the time in which the broker or its client was down."""
    ended, opened = run.ends[id]
    if not run.session_failures.get(id):
        # No session has failed, so a session that was opened later follows the client's death.
        due = max(due, opened)
    return ended - due - run.outage_within(due, ended)


# -- I2: one stream ---------------------------------------------------------------------------


def check_log(run: RecordedRun, planned: Planned) -> Iterator[str]:
    log = _log(run, planned)
    yield from _stream_faults(log, 0)
    for record in log[:-1]:
        if is_final(record):
            yield f"a final record at {record.index}, before the end"
    positions: dict[int, int] = {}
    for record in log:
        for delta in record.choices if isinstance(record, TokenChunk) else []:
            position = positions.get(delta.index, 0)
            if delta.position != position:
                yield (
                    f"choice {delta.index} continues at token {delta.position} instead of"
                    f" {position}, in record {record.index}"
                )
            positions[delta.index] = delta.position + len(delta.token_ids)


def check_sessions(run: RecordedRun, planned: Planned) -> Iterator[str]:
    log = _log(run, planned)
    for session in run.sessions.get(planned.id, []):
        name = f"session {session.opened.session}"
        records = [got.record for got in session.received]
        for text in _stream_faults(records, session.opened.start):
            yield f"{name}: {text}"
        for record in records:
            if record.index >= len(log) or log[record.index] != record:
                yield f"{name}: saw a record {record.index} that the log does not have"
                break


def _stream_faults(records: Sequence[LogRecord], start: int) -> Iterator[str]:
    for index, record in enumerate(records, start):
        if record.index != index:
            kind = "repeated" if record.index < index else "missing"
            yield f"record {record.index} instead of {index}: {kind}"
            return


# -- I3: the right tokens ---------------------------------------------------------------------


def check_tokens(run: RecordedRun, planned: Planned) -> Iterator[str]:
    expected, end = run.expected.get(planned.id), _end(run, planned)
    if expected is None:
        return
    finished = isinstance(end, Finish)
    yield from _choice_faults(_log(run, planned), expected, finished)
    if isinstance(end, Finish):
        expected_usage = (expected.prompt_tokens, sum(len(c.token_ids) for c in expected.choices))
        usage = (end.usage.prompt_tokens, end.usage.completion_tokens)
        if usage != expected_usage:
            yield f"usage {usage} instead of {expected_usage}"


def _choice_faults(log: Sequence[LogRecord], expected: Expected, finished: bool) -> Iterator[str]:
    deltas = [d for record in log if isinstance(record, TokenChunk) for d in record.choices]
    for index, target in enumerate(expected.choices):
        mine = [delta for delta in deltas if delta.index == index]
        token_ids = [token_id for delta in mine for token_id in delta.token_ids]
        text = "".join(delta.text for delta in mine)
        ends = [(d.finish_reason, d.stop_reason) for d in mine if d.finish_reason is not None]
        complete = finished or bool(ends)
        if token_ids != target.token_ids[: None if complete else len(token_ids)]:
            at = first_difference(token_ids, target.token_ids)
            yield f"choice {index}: token {at} differs, of {len(token_ids)}"
        elif text != target.text if complete else not target.text.startswith(text):
            yield f"choice {index}: the text differs: {text!r} instead of {target.text!r}"
        if complete and ends != [(target.finish_reason, target.stop_reason)]:
            yield (
                f"choice {index}: ended {ends} instead of once by"
                f" {(target.finish_reason, target.stop_reason)}"
            )
    if any(delta.index >= len(expected.choices) for delta in deltas):
        yield "tokens of a choice that was not requested"


def first_difference(values: Sequence[int], targets: Sequence[int]) -> int:
    """Return the first index at which the sequences differ or one of them ends."""
    pairs = zip(values, targets, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(values), len(targets)))


# -- I4: one live attempt ---------------------------------------------------------------------


def check_attempts(run: RecordedRun, planned: Planned) -> Iterator[str]:
    chunks = [record for record in _log(run, planned) if isinstance(record, TokenChunk)]
    for before, after in itertools.pairwise(chunks):
        if after.attempt < before.attempt:
            yield (
                f"record {after.index} is of attempt {after.attempt}, after one of attempt"
                f" {before.attempt}"
            )


# -- I10: honest errors -----------------------------------------------------------------------


def check_errors(run: RecordedRun, planned: Planned) -> Iterator[str]:
    end = _end(run, planned)
    if not isinstance(end, Failure):
        return
    code = end.error.code
    if _LEAKS.search(end.error.message):
        yield f"its error shows internals: {end.error.message!r}"
    if code == "cancelled":
        is_cancelled = planned.id in run.cancelled or planned.behaviour == "cancel"
        if not is_cancelled and not _left_by_dead_client(run, planned):
            yield "cancelled, although no client cancelled it"
    elif code == "deadline_exceeded":
        began, ended = run.sessions[planned.id][0].opened.t, run.ended.get(planned.id)
        if ended is not None and ended < began + planned.timeout_s - CLOCK_SLACK_S:
            yield f"deadline_exceeded after {ended - began:.2f} s of {planned.timeout_s:g} s"
        if planned.behaviour not in ("deadline", "harm"):
            yield f"did not end within its {planned.timeout_s:g} s, which is ample time"
    elif planned.behaviour != "harm" and not _outlived_workers(run, planned, code):
        yield f"failed with {code}: {end.error.message}"


def _outlived_workers(run: RecordedRun, planned: Planned, code: str) -> bool:
    """Return whether a request failed because the allowed number of workers died with it."""
    return code == "poison" and _count_deaths(run, planned) >= run.settings.max_deaths


def _count_deaths(run: RecordedRun, planned: Planned) -> int:
    """Return how many workers of one role died while they held the request without adding to it."""
    died = {
        (event.role, event.pid)
        for event in run.pool
        if isinstance(event, ProcessExited) and event.code != 0
    }
    roles = Counter(
        role
        for (role, pid), events in run.processes.items()
        if (role, pid) in died and _is_held_at_end(events, planned.bus_id)
    )
    return max(roles.values(), default=0)


def _is_held_at_end(events: list[Event], id: str) -> bool:
    held = False
    for event in events:
        if not isinstance(event, WorkerEvent) or event.id != id:
            continue
        if event.step == "received":
            held = True
        elif event.step in ("acked", "requeued", "appended"):
            held = False
    return held


def _left_by_dead_client(run: RecordedRun, planned: Planned) -> bool:
    """Return whether a death of the clients' process closed the connections of the request."""
    if not planned.http or planned.durable:
        return False
    began, ended = run.sessions[planned.id][0].opened.t, run.ended.get(planned.id, math.inf)
    return any(
        isinstance(event, Fault) and event.role == "load" and began < event.t < ended
        for event in run.pool
    )


# -- I11: poison harms no other request -------------------------------------------------------


def check_harm(run: RecordedRun, planned: Planned) -> Iterator[str]:
    if planned.behaviour != "harm" or planned.id not in run.accepted:
        return
    deaths = run.harmed[planned.id]
    end = _end(run, planned)
    code = end.error.code if isinstance(end, Failure) else "finish" if end else "no end"
    letters = [letter for letter in run.final.letters if letter.request_id == planned.id]
    if _seed_of(planned) == fake_model.HANGS_SEED:
        if code != "finish":
            yield f"hung in one engine, and ended with {code} instead of in another"
        return
    kills = _seed_of(planned) == fake_model.KILLS_SEED
    if kills and deaths > run.settings.max_deaths:
        yield f"killed {deaths} workers, {run.settings.max_deaths} are allowed"
    if deaths and code not in ("poison" if kills else "worker_failure", "deadline_exceeded"):
        yield f"a harmful request ended with {code}"
    if deaths and code in ("poison", "worker_failure") and not letters:
        yield f"ended with {code} without a dead letter"


def _seed_of(planned: Planned) -> int | None:
    sampling = planned.request.sampling_params
    return getattr(sampling, "seed", None)


# -- I12 and I14 ------------------------------------------------------------------------------


def check_same_again(run: RecordedRun, planned: Planned) -> Iterator[str]:
    """Check that a request sent again under its id gets the same records, to the end."""
    complete = [s for s in run.sessions.get(planned.id, []) if s.final is not None]
    for session in complete[1:]:
        records = [got.record for got in session.received]
        if records != [got.record for got in complete[0].received][session.opened.start :]:
            if complete[0].opened.start:
                continue
            yield f"session {session.opened.session} got other records than the first"
    if (
        planned.behaviour == "resubmit_after"
        and len(complete) == 1
        and _end(run, planned) is not None
    ):
        yield "sent again after its end, it got no answer"


def check_refusals(run: RecordedRun, planned: Planned) -> Iterator[str]:
    began_by_session = {s.opened.session: s.opened.t for s in run.sessions.get(planned.id, [])}
    failures = run.session_failures.get(planned.id, [])
    for event in failures:
        if event.code != "overloaded":
            continue
        began = began_by_session[event.session]
        took_s = event.t - began - run.outage_within(began, event.t)
        if took_s > run.bounds.refusal_s:
            yield f"refused after {took_s:.2f} s"
    # A stopped broker may store a request after its client has given up.
    is_unknown = any(event.code == "silence" for event in failures)
    is_refused = bool(began_by_session) and planned.id not in run.accepted and not is_unknown
    if is_refused and _log(run, planned):
        yield "never accepted, but it has a log"


Check = Callable[[RecordedRun, Planned], Iterator[str]]
CHECKS: tuple[tuple[str, Check], ...] = (
    ("I1", check_answered),
    ("I1", check_cancelled),
    ("I2", check_log),
    ("I2", check_sessions),
    ("I3", check_tokens),
    ("I4", check_attempts),
    ("I10", check_errors),
    ("I11", check_harm),
    ("I12", check_same_again),
    ("I14", check_refusals),
)
