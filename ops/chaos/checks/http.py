"""Invariants I1 to I3, I5, I10 and I12 for requests that came through gateways.

The log determines the events that a client must receive: one for each record, or one answer made of
all records. They are computed here with the gateway's own code. The text is also compared with the
expected text.
"""

import json
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from ops.chaos.checks.recorded_run import HttpSession, RecordedRun, Violation
from ops.chaos.clients.http_exchange import DONE
from ops.chaos.expected_answers import Expected
from ops.chaos.plan import MODEL, Planned
from shared.protocol.encoding import to_json
from shared.protocol.records import Failure, Finish, LogRecord, TokenChunk
from shared.state.log_records import is_final
from workers.gateway.core.assembler import Answering
from workers.gateway.http import errors
from workers.gateway.openai.chat import ChatOptions
from workers.gateway.openai.chat_assembler import ChatAssembler

# A gateway is down, a gateway is silent, or the broker does not answer the gateway.
TRANSIENT_CODES = ("connection", "silence", "503", "unavailable")

Event = tuple[int | None, Any]


def find(run: RecordedRun) -> Iterator[Violation]:
    """Yield the violations of all requests over HTTP."""
    for id, sessions in run.http_sessions.items():
        planned, log = run.planned[id], run.final.logs.get(id, [])
        created_s = _created_s(sessions)
        events = events_of(planned, log, created_s)
        for session in sessions:
            is_stream = planned.streamed or not session.opened.publishes
            due = events if is_stream else answer_of(planned, log, created_s)
            for text in _stream_faults(session, due):
                yield Violation("I2", id, f"session {session.opened.session}: {text}")
        for text in _text_faults(run, planned, sessions, log):
            yield Violation("I3", id, text)
        for failed in run.session_failures.get(id, []):
            if failed.code not in TRANSIENT_CODES:
                yield Violation("I10", id, f"failed with {failed.code}: {failed.reason}")
        if planned.behaviour == "resubmit_after" and len(_ended(sessions)) < 2:
            yield Violation("I12", id, "sent again after its end, it got no complete answer")
    yield from _record_faults(run)


def events_of(planned: Planned, log: list[LogRecord], created_s: int) -> list[Event]:
    """Return all events of a streamed answer, without the end mark."""
    options = ChatOptions(include_usage=planned.streamed)
    assembler = ChatAssembler(Answering(planned.id, MODEL, created_s, options))
    events: list[Event] = []
    for record in log:
        match record:
            case Failure():
                bodies: list[Any] = [errors.body_of(record.error)]
            case _:
                bodies = assembler.add(0, record)
        events += [(record.index, json.loads(to_json(body))) for body in bodies]
    return events


def answer_of(planned: Planned, log: list[LogRecord], created_s: int) -> list[Event]:
    """Return the one event of an answer that is not streamed; empty while there is no end."""
    assembler = ChatAssembler(Answering(planned.id, MODEL, created_s, ChatOptions()))
    body: Any = None
    for record in log:
        match record:
            case TokenChunk():
                assembler.add(0, record)
            case Finish():
                assembler.add(0, record)
                body = assembler.answer()
            case Failure():
                body = errors.body_of(record.error)
    return [] if body is None else [(0, json.loads(to_json(body)))]


def _record_faults(run: RecordedRun) -> Iterator[Violation]:
    """Check the gateways' request records, which are stored as long as the logs."""
    for id in run.final.gateway_records:
        planned, log = run.planned.get(id), run.final.logs.get(id, [])
        if planned is None or not planned.http:
            yield Violation("I5", id, "a gateway has a record of a request that it never received")
        elif not (log and is_final(log[-1])):
            yield Violation("I5", id, "a gateway has a record of a request that has not ended")
    for id in (run.http_sessions.keys() & run.accepted.keys()) - set(run.final.gateway_records):
        yield Violation("I12", id, "accepted, but no gateway has a record of it")


def _created_s(sessions: list[HttpSession]) -> int:
    """Return the creation time, which is the same in all answers to one request."""
    for session in sessions:
        for event in session.events:
            if event.data != DONE and "created" in (data := json.loads(event.data)):
                return int(data["created"])
    return 0


def _stream_faults(session: HttpSession, expected: list[Event]) -> Iterator[str]:
    ended = session.ended is not None
    due: list[Event] = [
        (at, body) for at, body in expected if at is not None and at >= session.opened.start
    ]
    received = [
        (event.at, json.loads(event.data)) for event in session.events if event.data != DONE
    ]
    if [at for at, _ in received] == [None]:
        # Neither an error in place of an answer nor an answer that is not streamed has a number.
        due = [(None, body) for _, body in due]
    for was, is_due in zip_longest(received, due):
        if was is None:
            if ended:
                yield f"ended without event {is_due[0]}"
            return
        if is_due is None:
            yield f"event {was[0]} follows the last one: {was[1]}"
            return
        if was != is_due:
            kind = "differs" if was[0] == is_due[0] else f"instead of {is_due[0]}"
            yield f"event {was[0]} {kind}: {was[1]}"
            return


def _ended(sessions: list[HttpSession]) -> list[HttpSession]:
    return [session for session in sessions if session.ended is not None]


def _text_faults(
    run: RecordedRun, planned: Planned, sessions: list[HttpSession], log: list[LogRecord]
) -> Iterator[str]:
    """Compare the text of all connections together with the expected one."""
    expected = run.expected.get(planned.id)
    if expected is None or not _ended(sessions) or not (log and isinstance(log[-1], Finish)):
        return
    numbered = {
        event.at: json.loads(event.data)
        for session in sessions
        for event in session.events
        if event.at is not None
    }
    wholes = [
        json.loads(event.data)
        for session in sessions
        for event in session.events
        if event.at is None and event.data != DONE
    ]
    streamed = [chunk for _, chunk in sorted(numbered.items())]
    for chunks in ([streamed] if streamed else []) + [[whole] for whole in wholes]:
        yield from _choice_faults(chunks, expected)


def _choice_faults(chunks: list[Any], expected: Expected) -> Iterator[str]:
    """Compare the chunks of a stream, or one complete answer, with what is expected."""
    texts, reasons = [""] * len(expected.choices), [""] * len(expected.choices)
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            message = choice["delta"] if "delta" in choice else choice["message"]
            texts[choice["index"]] += message.get("content", "")
            reasons[choice["index"]] += choice["finish_reason"] or ""
    for index, target in enumerate(expected.choices):
        if texts[index] != target.text:
            yield f"choice {index}: the text is {texts[index]!r} instead of {target.text!r}"
        if reasons[index] != target.finish_reason:
            yield f"choice {index}: ended by {reasons[index]!r}, not {target.finish_reason!r}"
