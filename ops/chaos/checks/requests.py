"""I1 to I4, I10 to I12 and I14: what each client saw of its request, and what its log holds."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

from ops.chaos import fake_model
from ops.chaos.checks.recorded_run import Run
from ops.chaos.checks.violation import Violation
from ops.chaos.expected_answers import Expected
from ops.chaos.history import Fault
from ops.chaos.plan import Planned
from shared.bus.streams import HEARTBEAT_TTL_S
from shared.protocol.messages import Failure, Finish, LogRecord, TokenChunk
from shared.state.token_log import is_final

# Clocks of broker and client are the same machine's; a timer may fire a little early.
CLOCK_SLACK_S = 0.15

_LEAKS = re.compile(r"Traceback|0x[0-9a-f]{6}|(?:^|\s)/(?:\w+/)+\w+|File \"")


def find(run: Run) -> Iterator[Violation]:
    for planned in run.planned.values():
        for invariant, check in CHECKS:
            for what in check(run, planned):
                yield Violation(invariant, planned.id, what)
    for id in run.final.logs.keys() - run.planned.keys():
        yield Violation("I5", id, "a log of a request that nobody asked for")


def _log(run: Run, planned: Planned) -> list[LogRecord]:
    return run.final.logs.get(planned.id, [])


def _end(run: Run, planned: Planned) -> LogRecord | None:
    log = _log(run, planned)
    return log[-1] if log and is_final(log[-1]) else None


# -- I1: accepted is answered, in time --------------------------------------------------------


def check_answered(run: Run, planned: Planned) -> Iterator[str]:
    accepted = run.accepted.get(planned.id)
    if accepted is None:
        if not run.broken.get(planned.id):
            yield "neither accepted nor refused: its client was never told anything"
        return
    if _end(run, planned) is None:
        yield f"accepted, but its log of {len(_log(run, planned))} records has no end"
    ended = run.ended.get(planned.id)
    if ended is None:
        yield "accepted, but no client ever saw its end"
        return
    late_s = _late_s(run, accepted + planned.timeout_s, ended)
    if late_s > run.bounds.after_deadline_s:
        yield f"ended {late_s:.2f} s after its deadline"


def check_cancelled(run: Run, planned: Planned) -> Iterator[str]:
    asked, ended = run.cancelled.get(planned.id), run.ended.get(planned.id)
    if asked is None or ended is None:
        return
    late_s = _late_s(run, asked.t, ended)
    if asked.gateway is not None and run.gateway_failed(
        asked.gateway, asked.t, asked.t + run.bounds.after_cancel_s
    ):
        return  # It may never have heard of it.
    if asked.gateway is not None and any(
        asked.t - HEARTBEAT_TTL_S < broke.t < asked.t for broke in run.broken.get(planned.id, [])
    ):
        # One that has died with the request counts as living, and as reading it for somebody.
        return
    if late_s > run.bounds.after_cancel_s:
        yield f"ended {late_s:.2f} s after its cancellation"


def _late_s(run: Run, due: float, ended: float) -> float:
    """What the broker was away for is not counted."""
    return ended - due - run.outage_within(due, ended)


# -- I2: one stream ---------------------------------------------------------------------------


def check_log(run: Run, planned: Planned) -> Iterator[str]:
    log = _log(run, planned)
    yield from _faults_of_stream(log, 0)
    for record in log[:-1]:
        if is_final(record):
            yield f"a final record at {record.index}, before the end"
    positions: dict[int, int] = {}
    for record in log:
        for delta in record.choices if isinstance(record, TokenChunk) else []:
            wanted = positions.get(delta.index, 0)
            if delta.position != wanted:
                yield (
                    f"choice {delta.index} goes on at token {delta.position} instead of {wanted},"
                    f" in record {record.index}"
                )
            positions[delta.index] = delta.position + len(delta.token_ids)


def check_sessions(run: Run, planned: Planned) -> Iterator[str]:
    log = _log(run, planned)
    for session in run.sessions.get(planned.id, []):
        name = f"session {session.asked.session}"
        records = [got.record for got in session.got]
        for what in _faults_of_stream(records, session.asked.start):
            yield f"{name}: {what}"
        for record in records:
            if record.index >= len(log) or log[record.index] != record:
                yield f"{name}: saw a record {record.index} that the log does not have"
                break


def _faults_of_stream(records: Sequence[LogRecord], start: int) -> Iterator[str]:
    for wanted, record in enumerate(records, start):
        if record.index != wanted:
            kind = "repeated" if record.index < wanted else "missing"
            yield f"record {record.index} instead of {wanted}: {kind}"
            return


# -- I3: the right tokens ---------------------------------------------------------------------


def check_tokens(run: Run, planned: Planned) -> Iterator[str]:
    expected, end = run.expected.get(planned.id), _end(run, planned)
    if expected is None:
        return
    finished = isinstance(end, Finish)
    yield from _faults_of_choices(_log(run, planned), expected, finished)
    if isinstance(end, Finish):
        wanted = (expected.prompt_tokens, sum(len(c.token_ids) for c in expected.choices))
        found = (end.usage.prompt_tokens, end.usage.completion_tokens)
        if found != wanted:
            yield f"usage {found} instead of {wanted}"


def _faults_of_choices(
    log: Sequence[LogRecord], expected: Expected, finished: bool
) -> Iterator[str]:
    deltas = [d for record in log if isinstance(record, TokenChunk) for d in record.choices]
    for index, wanted in enumerate(expected.choices):
        mine = [delta for delta in deltas if delta.index == index]
        token_ids = [token_id for delta in mine for token_id in delta.token_ids]
        text = "".join(delta.text for delta in mine)
        ends = [(d.finish_reason, d.stop_reason) for d in mine if d.finish_reason is not None]
        complete = finished or bool(ends)
        if token_ids != wanted.token_ids[: None if complete else len(token_ids)]:
            at = _first_difference(token_ids, wanted.token_ids)
            yield f"choice {index}: token {at} differs, of {len(token_ids)}"
        elif text != wanted.text if complete else not wanted.text.startswith(text):
            yield f"choice {index}: the text differs: {text!r} instead of {wanted.text!r}"
        if complete and ends != [(wanted.finish_reason, wanted.stop_reason)]:
            yield (
                f"choice {index}: ended {ends} instead of once by"
                f" {(wanted.finish_reason, wanted.stop_reason)}"
            )
    if any(delta.index >= len(expected.choices) for delta in deltas):
        yield "tokens of a choice that was not asked for"


def _first_difference(found: Sequence[int], wanted: Sequence[int]) -> int:
    pairs = zip(found, wanted, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))


# -- I4: one live attempt ---------------------------------------------------------------------


def check_attempts(run: Run, planned: Planned) -> Iterator[str]:
    chunks = [record for record in _log(run, planned) if isinstance(record, TokenChunk)]
    for before, after in itertools.pairwise(chunks):
        if after.attempt < before.attempt:
            yield (
                f"record {after.index} is of attempt {after.attempt}, after one of attempt"
                f" {before.attempt}"
            )


# -- I10: honest errors -----------------------------------------------------------------------


def check_errors(run: Run, planned: Planned) -> Iterator[str]:
    end = _end(run, planned)
    if not isinstance(end, Failure):
        return
    code = end.error.code
    if _LEAKS.search(end.error.message):
        yield f"its error tells of our insides: {end.error.message!r}"
    if code == "cancelled":
        asked_for = planned.id in run.cancelled or planned.behaviour == "cancel"
        if not asked_for and not _left_by_dead_client(run, planned):
            yield "cancelled, though nobody had asked for it"
    elif code == "deadline_exceeded":
        asked, ended = run.sessions[planned.id][0].asked.t, run.ended.get(planned.id)
        if ended is not None and ended < asked + planned.timeout_s - CLOCK_SLACK_S:
            yield f"deadline_exceeded after {ended - asked:.2f} s of {planned.timeout_s:g} s"
        if planned.behaviour not in ("deadline", "harm"):
            yield f"ran out of its {planned.timeout_s:g} s, which is plenty"
    elif planned.behaviour != "harm":
        yield f"failed with {code}: {end.error.message}"


def _left_by_dead_client(run: Run, planned: Planned) -> bool:
    """Its connections to gateways were closed with it."""
    if not planned.http or planned.durable:
        return False
    asked, ended = run.sessions[planned.id][0].asked.t, run.ended.get(planned.id, math.inf)
    return any(
        isinstance(event, Fault) and event.role == "load" and asked < event.t < ended
        for event in run.pool
    )


# -- I11: poison harms nobody else ------------------------------------------------------------


def check_harm(run: Run, planned: Planned) -> Iterator[str]:
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


def check_same_again(run: Run, planned: Planned) -> Iterator[str]:
    """Whoever asks again under the same id is told the same, to the end."""
    complete = [s for s in run.sessions.get(planned.id, []) if s.final is not None]
    for session in complete[1:]:
        records = [got.record for got in session.got]
        if records != [got.record for got in complete[0].got][session.asked.start :]:
            if complete[0].asked.start:
                continue
            yield f"session {session.asked.session} was told another story than the first"
    if planned.behaviour == "ask_after" and len(complete) == 1 and _end(run, planned) is not None:
        yield "asked again after its end, and got no answer"


def check_refusals(run: Run, planned: Planned) -> Iterator[str]:
    asked = {s.asked.session: s.asked.t for s in run.sessions.get(planned.id, [])}
    for event in run.broken.get(planned.id, []):
        if event.code != "overloaded":
            continue
        began = asked[event.session]
        took_s = event.t - began - run.outage_within(began, event.t)
        if took_s > run.bounds.refusal_s:
            yield f"refused after {took_s:.2f} s"
    if asked and planned.id not in run.accepted and _log(run, planned):
        yield "never accepted, and yet it has a log"


Check = Callable[[Run, Planned], Iterator[str]]
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
