"""A request that a gateway answers, from its record and its token logs."""

import asyncio
import base64
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar

import structlog
from msgspec.structs import replace
from starlette.requests import Request

from shared import client
from shared.errors import Cancelled, DecodeError, NotFound, PagemillError, Unavailable
from shared.protocol import names
from shared.protocol.encoding import to_json
from shared.protocol.messages import RequestRecord
from shared.protocol.records import (
    AnyRecord,
    AudioChunk,
    ErrorInfo,
    Failure,
    Finish,
    ImageRecord,
    LogRecord,
    OutputSummary,
    TokenChunk,
)
from shared.state import request_registry
from shared.state.log_reader import GRACE_S
from shared.state.token_log import last_record
from workers.gateway.app import AppContext
from workers.gateway.core.assembler import Answering, token_ids_to_decode
from workers.gateway.core.ids import format_event_id, named_request_id, part_ids
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import event

T = TypeVar("T")

# Peak memory of a character of an image in base64, with the JSON that is made of it.
ENCODED_BYTES = 3

_log = structlog.get_logger()


@dataclass(eq=False)
class ActiveRequest:
    """A request that this gateway is answering.

    Raises DecodeError for a record that another version of the gateway has written.
    """

    _context: AppContext
    request_id: str
    record: RequestRecord
    endpoint: InitVar[str]
    _holder: str = ""
    """The name given to `request_registry.register`, for a client whose disconnect ends the
    request."""
    recorded: asyncio.Task[RequestRecord] | None = None
    """Done when the registry has the record."""
    encode: Callable[[bytes, str], bytes] = event
    """Encodes an event of a stream, of its JSON and its id."""
    has_event_ids: bool = True
    """Whether the events of the stream have ids."""
    _began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self, endpoint: str) -> None:
        context, record, metrics = self._context, self.record, self._context.metrics
        self.parts = part_ids(self.request_id, record)
        self._num_tokens = metrics.counter("http_tokens_total", endpoint=endpoint)
        self._first_token_s = metrics.histogram(
            "http_time_to_first_token_seconds", endpoint=endpoint
        )
        self._first_audio_s = metrics.histogram(
            "http_time_to_first_audio_seconds", endpoint=endpoint
        )
        kind = context.kinds.get(record.kind)
        if kind is None:
            raise DecodeError(f"the kind {record.kind!r} of the stored request is not known")
        self.kind, self.options = kind, kind.read_options(record)
        token_bytes = context.token_bytes.of(record.model)
        self._assembler = kind.assembler(
            Answering(self.request_id, record.model, record.created_s, self.options, token_bytes)
        )

    async def events(
        self, logs: Sequence[AsyncIterator[AnyRecord]], start: Sequence[int]
    ) -> AsyncIterator[bytes]:
        """Yield an event for every record from `start` on that has something to show.

        Raises Failed.
        """
        self._assembler.collects_answer = False
        position = [-1] * len(logs)
        # Each record reserves as many event numbers as one may have events.
        max_events = self._assembler.max_events
        async for part, record in self._merged(logs):
            position[part] = record.index * max_events
            first, is_new = start[part], (record.index + 1) * max_events > start[part]
            # A preview that the client has seen is not read again.
            is_needed = is_new or isinstance(record, ImageRecord)
            file = await self._read_file(record) if is_needed else ""
            events = await self._add_record(part, record, file, self._event_id(position), first)
            for answer_event in events:
                if position[part] >= first:
                    data = self.encode(to_json(answer_event), self._event_id(position))
                    yield self._named(answer_event) + data
                position[part] += 1
            position[part] = (record.index + 1) * max_events - 1

    async def collect_answer(
        self, logs: Sequence[AsyncIterator[AnyRecord]], scope: MutableMapping[str, Any]
    ) -> Any:
        """Read the logs to their ends, and return the whole answer.

        Memory for a speech, and for images, is reserved in the `scope` of the HTTP request. Raises
        Failed, AnswerTooLarge or Overloaded.
        """
        budget, refusal = self._context.answer_budget, self.kind.budget.output
        async for part, record in self._merged(logs):
            file = await self._read_file(record)
            if isinstance(record, AudioChunk):
                budget.extend(scope, self._assembler.sample_bytes * record.num_samples, refusal)
            elif file:
                budget.extend(scope, ENCODED_BYTES * len(file), refusal)
            await self._add_record(part, record, file)
        return self._assembler.answer()

    async def sound(
        self, logs: Sequence[AsyncIterator[AnyRecord]]
    ) -> AsyncGenerator[AudioChunk, None]:
        """Yield the records of the speech, to the end of the request. Raises Failed."""
        self._assembler.collects_answer = False
        async with aclosing(self._merged(logs)) as records:
            async for part, record in records:
                await self._add_record(part, record)
                if isinstance(record, AudioChunk):
                    yield record

    def _merged(
        self, logs: Sequence[AsyncIterator[AnyRecord]]
    ) -> AsyncGenerator[tuple[int, AnyRecord], None]:
        return self.kind.order(self.options, merge_logs(logs))

    async def _read_file(self, record: AnyRecord) -> str:
        """Return the file that shows a record, in base64. Raises Unavailable if it is gone."""
        media = self._assembler.file_of(record)
        if not media:
            return ""
        data = await client.read_media(self._context.bus, media, self.record.tenant)
        return base64.b64encode(data).decode()

    def _named(self, one: Any) -> bytes:
        name = self.kind.event_name(one)
        return f"event: {name}\n".encode() if name else b""

    async def _add_record(
        self, part: int, record: AnyRecord, file: str = "", event_id: str = "", start: int = 0
    ) -> list[Any]:
        match record:
            case TokenChunk():
                if record.index == 0 and start == 0:
                    self._first_token_s.observe(time.monotonic() - self._began_s)
                self._num_tokens.add(sum(len(delta.token_ids) for delta in record.choices))
                token_ids = token_ids_to_decode(record)
                if record.index == 0:
                    token_ids.update(self._assembler.prompt_token_ids)
                with self.kind.fields_of(self.options).translated():
                    await self._context.token_bytes.load(
                        self.record.model, token_ids, self.record.tenant
                    )
            case AudioChunk() if record.first_sample == 0 and start == 0:
                self._first_audio_s.observe(time.monotonic() - self._began_s)
            case Finish():
                record = replace(record, outputs=self._client_outputs(record.outputs))
            case Failure():
                is_cancelled = record.error.code == Cancelled.code
                if is_cancelled and (shown := self._assembler.abort()) is not None:
                    return shown
                if record.index * self._assembler.max_events < start:
                    return []
                self.start_cancel()  # Other parts, if there are any, are of no use alone.
                raise errors.RequestFailed(self.client_error(record, part), event_id)
        return self._assembler.add(part, record, file)

    def _client_outputs(self, outputs: Mapping[str, OutputSummary]) -> dict[str, OutputSummary]:
        """Return the outputs, with errors whose fields have the client's names."""
        fields = self.kind.fields_of(self.options)
        return {
            name: replace(summary, error=fields.translate(summary.error))
            if summary.error is not None
            else summary
            for name, summary in outputs.items()
        }

    def client_error(self, failure: Failure, part: int | None = None) -> ErrorInfo:
        """Return the error with the field by the name that the request's endpoint has for it."""
        return self.kind.fields_of(self.options, part).translate(failure.error)

    def follow_logs(self) -> list[AsyncIterator[AnyRecord]]:
        """Return the logs, each read to its end or to the time at which it must have ended.

        The log of an output besides the text, if there is one, is the last.
        """
        bus, rest_s = self._context.bus, max(0.0, self._rest_s)
        logs: list[AsyncIterator[AnyRecord]] = [
            client.follow(bus, part, timeout_s=rest_s) for part in self.parts
        ]
        output = self.options.output
        if output is not None:
            logs.append(client.follow_output(bus, self.request_id, output.output, timeout_s=rest_s))
        return logs

    async def last_records(self) -> list[LogRecord | None]:
        """Return the last record of each part's own log, None for a log that has none."""
        bus = self._context.bus
        return await asyncio.gather(*(last_record(bus, part) for part in self.parts))

    @property
    def is_overdue(self) -> bool:
        """Whether the request must have ended by now, if a coordinator ever claimed it."""
        return self._rest_s < -GRACE_S

    @property
    def _rest_s(self) -> float:
        since_s = self._context.bus.now_ms() / 1000 - self.record.created_s
        return self.record.timeout_s - since_s

    def start_cancel(self) -> None:
        """Cancel the request in the background."""
        self._context.background.start(self._cancel())

    def on_disconnect(self) -> None:
        """Cancel a request that is not durable, unless another gateway answers it too."""
        if not self.record.durable:
            self._context.background.start(self._leave())

    def withdraw(self) -> None:
        """Let go of a request that is not published, and may be under the same id later."""
        self._context.background.start(self._unregister())

    async def _unregister(self) -> None:
        with suppress(PagemillError):
            await request_registry.unregister(self._context.bus, self.request_id, self._holder)

    async def _leave(self) -> None:
        """A connection may be found broken long after its client has come back over another."""
        assert self.recorded is not None
        try:
            await self.recorded
            was_last = await request_registry.unregister(
                self._context.bus, self.request_id, self._holder
            )
        except DecodeError:
            was_last = False  # A newer gateway has written the record, and may still answer.
        except PagemillError:
            was_last = True  # Without a record no other gateway can answer it.
        if was_last:
            await self._cancel()

    async def _cancel(self) -> None:
        try:
            for part in self.parts:
                await client.cancel(self._context.bus, part)
        except Unavailable as error:
            _log.warning("cancel_failed", request_id=self.request_id, reason=error.message)

    def _event_id(self, position: Sequence[int]) -> str:
        return format_event_id(position) if self.has_event_ids else ""


async def merge_logs(logs: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield records as they arrive, each with the number of its log. Raises what a log raises.

    No log is read ahead by more than one record. A caller that stops early leaves no reader behind.
    """
    waiting: dict[asyncio.Future[T | None], int] = {}

    def read_next(part: int) -> None:
        waiting[asyncio.ensure_future(anext(logs[part], None))] = part

    try:
        for part in range(len(logs)):
            read_next(part)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                part, record = waiting[task], task.result()
                del waiting[task]
                if record is not None:
                    yield part, record
                    read_next(part)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def find_request(context: AppContext, request: Request, caller: Caller) -> ActiveRequest:
    """Return the request that the path names, by its id or by the name that its client gave it.

    Raises NotFound, also for requests of other tenants.
    """
    name = request.path_params["id"]
    client_ids = [named_request_id(kind, caller.tenant, name) for kind in context.kinds.values()]
    ids = [name, *client_ids] if names.is_request_id(name) else client_ids
    for request_id in ids:
        record = await request_registry.find(context.bus, request_id)
        if record is not None and record.tenant == caller.tenant:
            request.scope["request_id"] = request_id, True
            with suppress(DecodeError):
                return ActiveRequest(context, request_id, record, request.scope["endpoint_path"])
    raise NotFound("there is no such request, or it has been removed", field="id")
