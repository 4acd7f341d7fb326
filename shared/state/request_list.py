"""The list of requests: read from the ends of the streams, and from the queues of the stages.

Nothing keeps a list of requests. This one has those of which a trace is among the latest messages
of token logs, attempts and gateways' records, and those in a stage. Fields of which nothing is
stored are None: the model of an ended request is known from its attempts and a gateway's record.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.protocol import names, subjects
from shared.protocol.messages import AttemptRecord, RequestRecord, decode_attempt
from shared.protocol.records import Failure, Finish, TokenChunk
from shared.state import request_registry
from shared.state.log_reader import GRACE_S
from shared.state.log_records import decode_record
from shared.state.request_status import State
from shared.state.response_status import AGENT
from shared.state.token_log import last_record

# Messages that are read from the end of each stream.
WINDOW = 2048
# Requests that are listed at most. Their models, and last records, are looked up one by one.
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
    """Since its first trace that is stored."""
    end: str | None
    """Finish reason, or code of the error."""


class Listing(NamedTuple):
    requests: list[ListedRequest]
    """The newest first."""
    is_cut: bool
    """Whether there may be older requests that were not looked at."""


@dataclass
class Trace:
    """What the messages say of one request."""

    first_ms: float | None = None
    model: str | None = None
    stage: str | None = None
    """The stage in whose queue it is."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each choice so far."""
    finish_reason: str | None = None
    final: Finish | Failure | None = None
    waits_until_ms: float = 0.0
    """Until then, a request that a gateway has recorded may wait for a coordinator. Later it has
    ended or was never accepted."""
    is_looked_up: bool = False

    def see(self, ms: float) -> None:
        """Note the time of a message of this request."""
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
    """The requests of the messages that were added. Pure."""

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}

    def add_name(self, subject: str) -> Trace | None:
        """Return the trace of a request; None for the name of an item task."""
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
            attempt = decode_attempt(message.data)
            if attempt is not None and attempt.stage == AGENT:  # Responses are no requests.
                continue
            trace = self.add_name(message.subject)
            if trace is not None and attempt is not None:
                trace.attempts.append(attempt)
                trace.model = trace.model or attempt.model or None
                trace.see(attempt.began_ms)

    def add_record(self, request_id: str, record: RequestRecord) -> None:
        """Add the record that a gateway has of a request, or of the parts that it consists of."""
        if record.num_parts > 1:
            del self.traces[request_id]
            for name in (f"{request_id}-{i}" for i in range(record.num_parts)):
                if name in self.traces:
                    self.traces[name].model = record.model
            return
        trace = self.traces[request_id]
        if not record.timeout_s and trace == Trace(is_looked_up=True):
            del self.traces[request_id]  # It is another name of a request.
            return
        trace.model = record.model
        trace.waits_until_ms = 1000 * (record.created_s + record.timeout_s + GRACE_S)
        trace.see(1000.0 * record.created_s)

    def cut(self, num_requests: int, now_ms: float) -> bool:
        """Forget all but the newest requests, and return whether there were more."""
        older = self.rows(now_ms)[num_requests:]
        for row in older:
            del self.traces[row.request_id]
        return bool(older)

    def incomplete(self) -> list[str]:
        """Return the requests of which not all was looked up, or that are nowhere."""
        return [
            request_id
            for request_id, trace in self.traces.items()
            if not trace.is_looked_up or (trace.final is None and trace.stage is None)
        ]

    def set_queued(self, queued: Iterable[str]) -> None:
        """Set the subjects of all tasks that stages have."""
        for trace in self.traces.values():
            trace.stage = None
        for subject in queued:
            found = self.add_name(subject)
            if found is not None:
                found.stage, found.model, _ = subjects.parts_of_stage(subject)

    def rows(self, now_ms: float) -> list[ListedRequest]:
        """Return all requests, the newest first; those without a time before."""
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
    """Reads the list. Each further `update` reads what is new."""

    def __init__(self, bus: Bus, window: int = WINDOW) -> None:
        self._bus = bus
        self._window = window
        self._table = RequestTable()
        self._next: dict[str, int] = {}
        """The first sequence of each stream that was not read."""
        self._is_cut = False

    async def update(self) -> Listing:
        """Raises Unavailable."""
        self._table.add_records(await self._read_end(subjects.TOKENS_STREAM, subjects.tokens("*")))
        stream = subjects.ATTEMPTS_STREAM
        self._table.add_attempts(await self._read_end(stream, subjects.ATTEMPTS_FILTER))
        records = await self._read_end(subjects.JOBS_STREAM, subjects.JOBS_FILTER)
        for message in records:
            self._table.add_name(message.subject)
        queued = await self._bus.subjects_of(subjects.STAGES_STREAM, subjects.STAGES_FILTER)
        self._table.set_queued(queued)
        await self._look_up()
        return Listing(self._table.rows(self._bus.now_ms()), self._is_cut)

    async def _read_end(self, stream: str, subject: str) -> list[StoredMessage]:
        """Return what is new in a stream: of the first time, the latest messages."""
        first, last = await self._bus.sequence_range(stream)
        start = max(self._next.get(stream, first), last - self._window + 1)
        self._is_cut |= start > first and stream not in self._next
        self._next[stream] = last + 1
        return await self._bus.read(stream, subject, start) if start <= last else []

    async def _look_up(self) -> None:
        """Look up what the messages did not say."""
        self._is_cut |= self._table.cut(MAX_REQUESTS, self._bus.now_ms())
        credit = asyncio.Semaphore(LOOKUPS_AT_ONCE)

        async def look_up(request_id: str) -> None:
            async with credit:
                await self._look_up_one(request_id)

        await asyncio.gather(*(look_up(request_id) for request_id in self._table.incomplete()))

    async def _look_up_one(self, request_id: str) -> None:
        trace = self._table.traces[request_id]
        if trace.final is None and trace.stage is None:
            # It may have ended since, or before the messages that were read.
            last = await last_record(self._bus, request_id)
            if isinstance(last, Finish | Failure):
                self._table.add_final(trace, last)
        if not trace.is_looked_up:
            trace.is_looked_up = True
            record = await request_registry.find(self._bus, request_id)
            if record is not None:
                self._table.add_record(request_id, record)
