"""List of requests, read from the ends of streams and from the queues of stages.

No stream contains a list of requests. This list has the requests with a message among the latest
messages of token logs, attempts and gateways' records, and the requests in a stage. Unknown fields
are None. For example, the model of an ended request is known only from its attempts or the record
of a gateway.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.helpers.task_set import run_for_each
from shared.protocol import names, subjects
from shared.protocol.messages import AttemptRecord, RequestRecord, decode_attempt
from shared.protocol.reading import State
from shared.protocol.records import Failure, Finish, TokenChunk
from shared.state import request_registry
from shared.state.log_reader import GRACE_S
from shared.state.log_records import decode_record
from shared.state.token_log import last_record

# Number of messages to read from the end of each stream.
WINDOW = 2048
# Limit on listed requests, because their models and last records are looked up one by one.
MAX_REQUESTS = 500
LOOKUPS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ListedRequest:
    request_id: str
    state: State
    model: str | None
    stage: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    age_s: float | None
    """Time since the first stored message of the request."""
    end: str | None
    """Finish reason, or code of the error."""


class Listing(NamedTuple):
    requests: list[ListedRequest]
    """Requests, the newest first."""
    is_cut: bool
    """Whether there may be older requests that were not read."""


@dataclass
class Trace:
    """Data of one request from its messages."""

    first_ms: float | None = None
    model: str | None = None
    stage: str | None = None
    """Stage with a task of the request."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Number of tokens so far, by choice."""
    finish_reason: str | None = None
    final: Finish | Failure | None = None
    waits_until_ms: float = 0.0
    """Time until which a request with a gateway's record may wait for a coordinator. After it, the
    request has ended or was never accepted."""
    is_looked_up: bool = False

    def see(self, ms: float) -> None:
        """Record the time of a message of this request."""
        self.first_ms = ms if self.first_ms is None else min(self.first_ms, ms)

    def state(self, now_ms: float) -> State:
        if self.final is not None:
            return "finished" if isinstance(self.final, Finish) else "failed"
        if self.stage is None:
            is_expected = not self.attempts and now_ms < self.waits_until_ms
            return "running" if self.num_tokens else "queued" if is_expected else "unknown"
        last = next((a for a in reversed(self.attempts) if a.stage == self.stage), None)
        return "running" if last is not None and last.outcome == "open" else "queued"


class RequestTable:
    """Table of the requests in added messages. Pure."""

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}

    def add_name(self, subject: str) -> Trace | None:
        """Return the trace of a request; None for an item task, a batch or a response."""
        name = subjects.id_in(subject)
        return self.traces.setdefault(name, Trace()) if names.is_scoped_id(name) else None

    def add_records(self, messages: Iterable[StoredMessage]) -> None:
        """Add messages of token logs."""
        for message in messages:
            record, trace = decode_record(message.data), self.add_name(message.subject)
            if trace is None or not isinstance(record, TokenChunk | Finish | Failure):
                continue
            trace.see(message.stored_ms)
            if isinstance(record, TokenChunk):
                for choice in record.choices:
                    trace.num_tokens[choice.index] = choice.position + len(choice.token_ids)
                    trace.finish_reason = choice.finish_reason or trace.finish_reason
            else:
                self.add_final(trace, record)

    def add_final(self, trace: Trace, record: Finish | Failure) -> None:
        trace.final = record
        if record.path:
            trace.see(record.path[0].received_ms)

    def add_attempts(self, messages: Iterable[StoredMessage]) -> None:
        for message in messages:
            attempt, trace = decode_attempt(message.data), self.add_name(message.subject)
            if trace is not None and attempt is not None:
                trace.attempts.append(attempt)
                trace.model = trace.model or attempt.model or None
                trace.see(attempt.began_ms)

    def add_record(self, request_id: str, record: RequestRecord) -> None:
        """Add a gateway's record of a request, or of the parts of a request."""
        if record.num_parts > 1:
            del self.traces[request_id]
            for name in (names.part_id(request_id, i) for i in range(record.num_parts)):
                if name in self.traces:
                    self.traces[name].model = record.model
            return
        trace = self.traces[request_id]
        if not record.timeout_s and trace == Trace(is_looked_up=True):
            del self.traces[request_id]  # Another name of a request that is already in the table.
            return
        trace.model = record.model
        trace.waits_until_ms = 1000 * (record.created_s + record.timeout_s + GRACE_S)
        trace.see(1000.0 * record.created_s)

    def cut(self, num_requests: int, now_ms: float) -> bool:
        """Remove all but the newest requests, and return whether there were more."""
        older = self.rows(now_ms)[num_requests:]
        for row in older:
            del self.traces[row.request_id]
        return bool(older)

    def incomplete(self) -> list[str]:
        """Return the requests with unknown fields, or without a known place."""
        return [
            request_id
            for request_id, trace in self.traces.items()
            if not trace.is_looked_up or (trace.final is None and trace.stage is None)
        ]

    def set_queued(self, queued: Iterable[str]) -> None:
        """Set the stages of requests from the subjects of all queued tasks."""
        for trace in self.traces.values():
            trace.stage = None
        for subject in queued:
            queued_trace = self.add_name(subject)
            if queued_trace is not None:
                queued_trace.stage, queued_trace.model, _ = subjects.parts_of_stage(subject)

    def rows(self, now_ms: float) -> list[ListedRequest]:
        """Return all requests: first the requests without a time, then the others, newest first."""
        rows = [_row(request_id, trace, now_ms) for request_id, trace in self.traces.items()]
        return sorted(rows, key=lambda row: (row.age_s or 0.0, row.request_id))


def _row(request_id: str, trace: Trace, now_ms: float) -> ListedRequest:
    final, num_tokens = trace.final, sum(trace.num_tokens.values()) if trace.num_tokens else None
    prompt, end = None, None
    if isinstance(final, Finish):
        prompt, num_tokens = final.usage.prompt_tokens, final.usage.completion_tokens
        end = trace.finish_reason
    elif final is not None:
        end = final.error.code
    age_s = None if trace.first_ms is None else max(0.0, (now_ms - trace.first_ms) / 1000)
    return ListedRequest(
        request_id, trace.state(now_ms), trace.model, trace.stage, prompt, num_tokens, age_s, end
    )


class RequestLister:
    """Reads the list. Each further `update` reads only new messages."""

    def __init__(self, bus: Bus, window: int = WINDOW) -> None:
        self._bus = bus
        self._window = window
        self._table = RequestTable()
        self._next: dict[str, int] = {}
        """First unread sequence of each stream."""
        self._is_cut = False

    async def update(self) -> Listing:
        """Raises Unavailable."""
        logs = await self._read_end(subjects.TOKENS_STREAM, subjects.TOKENS_FILTER)
        self._table.add_records(log for log in logs if subjects.is_text_log(log.subject))
        stream = subjects.ATTEMPTS_STREAM
        self._table.add_attempts(await self._read_end(stream, subjects.ATTEMPTS_FILTER))
        records = await self._read_end(subjects.JOBS_STREAM, subjects.JOBS_FILTER)
        for message in records:
            self._table.add_name(message.subject)
        queued = await self._bus.figures.subjects_of(subjects.STAGES_STREAM, subjects.STAGES_FILTER)
        self._table.set_queued(queued)
        await self._look_up()
        return Listing(self._table.rows(self._bus.now_ms()), self._is_cut)

    async def _read_end(self, stream: str, subject: str) -> list[StoredMessage]:
        """Return the new messages of a stream; the first time, its latest messages."""
        first, last = await self._bus.figures.sequence_range(stream)
        start = max(self._next.get(stream, first), last - self._window + 1)
        self._is_cut |= start > first and stream not in self._next
        self._next[stream] = last + 1
        return await self._bus.read(stream, subject, start) if start <= last else []

    async def _look_up(self) -> None:
        """Look up the fields that the messages did not contain."""
        self._is_cut |= self._table.cut(MAX_REQUESTS, self._bus.now_ms())
        await run_for_each(self._look_up_one, self._table.incomplete(), LOOKUPS_AT_ONCE)

    async def _look_up_one(self, request_id: str) -> None:
        trace = self._table.traces[request_id]
        if trace.final is None and trace.stage is None:
            # The request may have ended meanwhile, or before the messages that were read.
            last = await last_record(self._bus, request_id)
            if isinstance(last, Finish | Failure):
                self._table.add_final(trace, last)
        if not trace.is_looked_up:
            trace.is_looked_up = True
            record = await request_registry.find(self._bus, request_id)
            if record is not None:
                self._table.add_record(request_id, record)
