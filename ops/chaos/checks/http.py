"""I1 to I3, I5, I10 and I12 of what came through gateways.

What a client is to see follows from the log: the events of its records, one after the other, or one
answer made of all of them. The gateway's own code says here what these are; the text must be the
expected one besides.
"""

import json
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from ops.chaos.checks.recorded_run import Reading, Run
from ops.chaos.checks.violation import Violation
from ops.chaos.clients.http_exchange import DONE
from ops.chaos.expected_answers import Expected
from ops.chaos.plan import MODEL, Planned
from shared.protocol.messages import Failure, Finish, LogRecord, TokenChunk
from shared.state.token_log import is_final
from workers.gateway.http import errors
from workers.gateway.openai.chat_assembler import ChatAssembler, ChatOptions

# A gateway that is not there, one that says nothing, and a broker that does not answer it.
PASSING = ("connection", "silence", "503", "unavailable")

Shown = tuple[int | None, Any]


def find(run: Run) -> Iterator[Violation]:
    for id, readings in run.readings.items():
        planned, log = run.planned[id], run.final.logs.get(id, [])
        created_s = _created_s(readings)
        wanted = events_of(planned, log, created_s)
        for reading in readings:
            is_stream = planned.streamed or not reading.asked.publishes
            due = wanted if is_stream else answer_of(planned, log, created_s)
            for what in _faults_of(reading, due):
                yield Violation("I2", id, f"session {reading.asked.session}: {what}")
        for what in _faults_of_text(run, planned, readings, log):
            yield Violation("I3", id, what)
        for broke in run.broken.get(id, []):
            if broke.code not in PASSING:
                yield Violation("I10", id, f"was told {broke.code}: {broke.reason}")
        if planned.behaviour == "ask_after" and len(_ended(readings)) < 2:
            yield Violation("I12", id, "asked again after its end, and got no whole answer")
    yield from _faults_of_notes(run)


def events_of(planned: Planned, log: list[LogRecord], created_s: int) -> list[Shown]:
    """All that there is to see of a request, without the end mark."""
    options = ChatOptions(include_usage=planned.streamed)
    assembler = ChatAssembler(planned.bus_id, MODEL, created_s, options, {})
    found: list[Shown] = []
    for record in log:
        match record:
            case TokenChunk():
                shown: Any = assembler.add(0, record)
            case Finish():
                shown = assembler.finish(0, record.usage)
            case Failure():
                shown = errors.body_of(record.error)
        if shown is not None:
            found.append((record.index, json.loads(errors.to_json(shown))))
    return found


def answer_of(planned: Planned, log: list[LogRecord], created_s: int) -> list[Shown]:
    """What there is to see of it by one who is answered with the whole."""
    assembler = ChatAssembler(planned.bus_id, MODEL, created_s, ChatOptions(), {})
    shown: Any = None
    for record in log:
        match record:
            case TokenChunk():
                assembler.add(0, record)
            case Finish():
                assembler.finish(0, record.usage)
                shown = assembler.answer()
            case Failure():
                shown = errors.body_of(record.error)
    return [] if shown is None else [(0, json.loads(errors.to_json(shown)))]


def _faults_of_notes(run: Run) -> Iterator[Violation]:
    """They are kept as long as the logs of their requests, and are of no use without."""
    for id in run.final.notes:
        planned, log = run.planned.get(id), run.final.logs.get(id, [])
        if planned is None or not planned.http:
            yield Violation("I5", id, "a note of a request that nobody asked a gateway for")
        elif not (log and is_final(log[-1])):
            yield Violation("I5", id, "a note of a request that has not ended")
    for id in (run.readings.keys() & run.accepted.keys()) - set(run.final.notes):
        yield Violation("I12", id, "accepted, and no gateway has a note of it")


def _created_s(readings: list[Reading]) -> int:
    """The same in all of them, or they are not of one request."""
    for reading in readings:
        for saw in reading.saw:
            if saw.data != DONE and "created" in (data := json.loads(saw.data)):
                return int(data["created"])
    return 0


def _faults_of(reading: Reading, wanted: list[Shown]) -> Iterator[str]:
    ended = reading.ended is not None
    due: list[Shown] = [
        (at, shown) for at, shown in wanted if at is not None and at >= reading.asked.start
    ]
    seen = [(saw.at, json.loads(saw.data)) for saw in reading.saw if saw.data != DONE]
    if [at for at, _ in seen] == [None]:
        # An error in the place of an answer has no number, nor has an answer that is one whole.
        due = [(None, shown) for _, shown in due]
    for was, is_due in zip_longest(seen, due):
        if was is None:
            if ended:
                yield f"ended without event {is_due[0]}"
            return
        if is_due is None:
            yield f"event {was[0]} is more than there is: {was[1]}"
            return
        if was != is_due:
            kind = "differs" if was[0] == is_due[0] else f"instead of {is_due[0]}"
            yield f"event {was[0]} {kind}: {was[1]}"
            return


def _ended(readings: list[Reading]) -> list[Reading]:
    return [r for r in readings if r.ended is not None]


def _faults_of_text(
    run: Run, planned: Planned, readings: list[Reading], log: list[LogRecord]
) -> Iterator[str]:
    """Of all connections together."""
    expected = run.expected.get(planned.id)
    if expected is None or not _ended(readings) or not (log and isinstance(log[-1], Finish)):
        return
    numbered = {
        saw.at: json.loads(saw.data) for r in readings for saw in r.saw if saw.at is not None
    }
    wholes = [
        json.loads(saw.data)
        for r in readings
        for saw in r.saw
        if saw.at is None and saw.data != DONE
    ]
    streamed = [chunk for _, chunk in sorted(numbered.items())]
    for shown in ([streamed] if streamed else []) + [[whole] for whole in wholes]:
        yield from _faults_of_choices(shown, expected)


def _faults_of_choices(shown: list[Any], expected: Expected) -> Iterator[str]:
    """Of the chunks of a stream, or of one whole answer."""
    texts, reasons = [""] * len(expected.choices), [""] * len(expected.choices)
    for chunk in shown:
        for choice in chunk.get("choices", []):
            said = choice["delta"] if "delta" in choice else choice["message"]
            texts[choice["index"]] += said.get("content", "")
            reasons[choice["index"]] += choice["finish_reason"] or ""
    for index, wanted in enumerate(expected.choices):
        if texts[index] != wanted.text:
            yield f"choice {index}: {texts[index]!r} was shown instead of {wanted.text!r}"
        if reasons[index] != wanted.finish_reason:
            yield f"choice {index}: ended by {reasons[index]!r}, not {wanted.finish_reason!r}"
