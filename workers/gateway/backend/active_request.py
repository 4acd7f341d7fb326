"""A request that a gateway answers from the request's record and token logs."""

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
from itertools import islice
from typing import Any, TypeVar

import structlog
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request

from shared import client
from shared.errors import Cancelled, DecodeError, NotFound, PagemillError, Unavailable
from shared.protocol import names
from shared.protocol.encoding import to_json
from shared.protocol.messages import RequestRecord
from shared.protocol.reading import RequestStatus
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
    Usage,
)
from shared.protocol.traces import trace_of
from shared.state import request_registry, request_status
from shared.state.log_reader import GRACE_S
from shared.state.token_log import last_record
from shared.telemetry import logs
from workers.gateway.app import AppContext
from workers.gateway.core.assembler import Answering
from workers.gateway.core.ids import format_event_id, named_request_id, part_ids
from workers.gateway.core.log_answer import LOG
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import event

T = TypeVar("T")

MAX_OPEN_LOGS = 64
"""Limit on the logs that an answer reads at one time. A part is published when its log is opened,
so a request with many parts takes turns with other requests."""

_log = structlog.get_logger()


class ActiveRequest:
    """A request that this gateway is answering."""

    def __init__(
        self,
        context: AppContext,
        request_id: str,
        record: RequestRecord,
        scope: MutableMapping[str, Any],
        holder: str = "",
        registration: asyncio.Task[RequestRecord] | None = None,
    ) -> None:
        """`request_id` has no tenant. `scope` is the scope of the HTTP request. `holder` is this
        gateway's name at the registry; "" for a client whose disconnect must not end the request.

        Raises DecodeError for a record that another version of the gateway has written.
        """
        kind = context.kinds.get(record.kind)
        if kind is None:
            raise DecodeError(f"the kind {record.kind!r} of the stored request is not known")
        self.request_id = request_id
        self.bus_id = names.scoped_id(request_id, record.tenant)
        """Id of the request on the bus."""
        self.record = record
        self.registration = registration
        """Done when the registry has the record."""
        self.encode: Callable[[bytes, str], bytes] = event
        """Encodes an event of a stream from its JSON and its id."""
        self.has_event_ids = True
        """Whether the events of the stream have ids."""
        self.parts = part_ids(self.bus_id, record)
        self.kind, self.options = kind, kind.read_options(record)
        self.trace = {} if record.trace is UNSET else record.trace
        """Headers of the client's trace."""
        tracing = context.config.tracing
        trace = trace_of(self.trace, self.bus_id, tracing.ratio if tracing.otlp_url else 0.0)
        logs.bind_trace(None if trace is None else trace.trace_id)
        self._context = context
        self._holder = holder
        self._began_s = time.monotonic()
        self._usages: list[Usage] = []
        scope["usages"], endpoint = self._usages, scope["endpoint_path"]
        metrics, token_bytes = context.metrics, context.token_bytes.of(record.model)
        self._num_tokens = metrics.counter("http_tokens_total", endpoint=endpoint)
        self._first_token_s = metrics.histogram(
            "http_time_to_first_token_seconds", endpoint=endpoint
        )
        self._first_audio_s = metrics.histogram(
            "http_time_to_first_audio_seconds", endpoint=endpoint
        )
        self._assembler = kind.assembler(
            Answering(request_id, record.model, record.created_s, self.options, token_bytes)
        )

    async def events(
        self, logs: Sequence[AsyncGenerator[AnyRecord, None]], start: Sequence[int]
    ) -> AsyncIterator[bytes]:
        """Yield the encoded events of each log, from the log's number in `start`.

        Raises RequestFailed.
        """
        self._assembler.collects_answer = False
        position = [-1] * len(logs)
        # Each record reserves the same number of event numbers, so that they do not depend on the
        # events of earlier records.
        max_events = self._assembler.max_events
        async with aclosing(self._merged(logs)) as records:
            async for part, record in records:
                position[part] = record.index * max_events
                first, is_new = start[part], (record.index + 1) * max_events > start[part]
                # A preview that the client has seen is not read again.
                is_needed = is_new or isinstance(record, ImageRecord)
                file = await self._read_file(record) if is_needed else ""
                events = await self._add_record(part, record, file, self._event_id(position), first)
                for answer_event in events:
                    if position[part] >= first:
                        data = self.encode(to_json(answer_event), self._event_id(position))
                        yield self._event_head(answer_event) + data
                    position[part] += 1
                position[part] = (record.index + 1) * max_events - 1

    async def collect_answer(
        self, logs: Sequence[AsyncGenerator[AnyRecord, None]], scope: MutableMapping[str, Any]
    ) -> Any:
        """Read the logs to their ends, and return the whole answer.

        Memory for a speech and for images is reserved in the `scope` of the HTTP request. Raises
        RequestFailed, AnswerTooLarge or Overloaded.
        """
        budget, refusal = self._context.answer_budget, self.kind.budget.output
        async with aclosing(self._merged(logs)) as records:
            async for part, record in records:
                file = await self._read_file(record)
                if num_bytes := self._assembler.num_bytes_of(record, file):
                    budget.extend(scope, num_bytes, refusal)
                await self._add_record(part, record, file)
        return self._assembler.answer()

    async def sound(
        self, logs: Sequence[AsyncGenerator[AnyRecord, None]]
    ) -> AsyncGenerator[AudioChunk, None]:
        """Yield the records of the speech, to the end of the request. Raises RequestFailed."""
        self._assembler.collects_answer = False
        async with aclosing(self._merged(logs)) as records:
            async for part, record in records:
                await self._add_record(part, record)
                if isinstance(record, AudioChunk):
                    yield record

    def _merged(
        self, logs: Sequence[AsyncGenerator[AnyRecord, None]]
    ) -> AsyncGenerator[tuple[int, AnyRecord], None]:
        return self.kind.order(self.options, merge_logs(logs))

    async def _read_file(self, record: AnyRecord) -> str:
        """Return the file of a record in base64, "" for none. Raises Unavailable if it is gone."""
        media = self._assembler.file_of(record)
        if not media:
            return ""
        data = await client.read_media(self._context.bus, media, self.record.tenant)
        return base64.b64encode(data).decode()

    def _event_head(self, answer_event: Any) -> bytes:
        name = self.kind.event_name(answer_event)
        return f"event: {name}\n".encode() if name else b""

    async def _add_record(
        self, part: int, record: AnyRecord, file: str = "", event_id: str = "", start: int = 0
    ) -> list[Any]:
        match record:
            case TokenChunk():
                if record.index == 0 and start == 0:
                    self._first_token_s.observe(time.monotonic() - self._began_s)
                self._num_tokens.add(sum(len(delta.token_ids) for delta in record.choices))
                token_ids = self._assembler.token_ids_of(record)
                with self.kind.fields_of(self.options).translated():
                    await self._context.token_bytes.load(
                        self.record.model, token_ids, self.record.tenant
                    )
            case AudioChunk() if record.first_sample == 0 and start == 0:
                self._first_audio_s.observe(time.monotonic() - self._began_s)
            case Finish():
                self._usages.append(record.usage)
                record = replace(record, outputs=self._client_outputs(record.outputs))
            case Failure():
                is_cancelled = record.error.code == Cancelled.code
                if is_cancelled and (last_events := self._assembler.abort()) is not None:
                    return last_events
                if record.index * self._assembler.max_events < start:
                    return []
                self.start_cancel()  # The other parts are useless without this one.
                raise errors.RequestFailed(self.client_error(record, part), event_id)
        return self._assembler.add(part, record, file)

    def _client_outputs(self, outputs: Mapping[str, OutputSummary]) -> dict[str, OutputSummary]:
        """Return the outputs, with the client's names of fields in their errors."""
        fields = self.kind.fields_of(self.options)
        return {
            name: replace(summary, error=fields.translate(summary.error))
            if summary.error is not None
            else summary
            for name, summary in outputs.items()
        }

    def client_error(self, failure: Failure, part: int | None = None) -> ErrorInfo:
        """Return the error with the client's name of its field."""
        return self.kind.fields_of(self.options, part).translate(failure.error)

    def follow_logs(self) -> list[AsyncGenerator[AnyRecord, None]]:
        """Return the logs, each read to its end, or until the request must have ended.

        The last one is the log of the output besides the text, if there is one.
        """
        bus, rest_s = self._context.bus, max(0.0, self.rest_s)
        logs: list[AsyncGenerator[AnyRecord, None]] = [
            client.follow(bus, part, timeout_s=rest_s) for part in self.parts
        ]
        output = self.options.output
        if output is not None:
            logs.append(client.follow_output(bus, self.bus_id, output.output, timeout_s=rest_s))
        return logs

    async def last_records(self) -> list[LogRecord | None]:
        """Return the last record of each part's token log, None for an empty log."""
        bus = self._context.bus
        return await asyncio.gather(*(last_record(bus, part) for part in self.parts))

    @property
    def is_overdue(self) -> bool:
        """Whether the request must have ended by now, if a coordinator has claimed it."""
        return self.rest_s < -GRACE_S

    @property
    def rest_s(self) -> float:
        """Seconds until the request must have ended; negative afterwards."""
        age_s = self._context.bus.now_ms() / 1000 - self.record.created_s
        return self.record.timeout_s - age_s

    def start_cancel(self) -> None:
        """Cancel the request in the background."""
        self._context.background.start(self._cancel())

    def on_disconnect(self) -> None:
        """Cancel a request that is not durable, unless another gateway answers it too."""
        if not self.record.durable:
            self._context.background.start(self._leave())

    def withdraw(self) -> None:
        """Unregister a request that was not published. Its id may be used again."""
        self._context.background.start(self._unregister())

    async def _unregister(self) -> None:
        with suppress(PagemillError):
            await request_registry.unregister(self._context.bus, self.bus_id, self._holder)

    async def _leave(self) -> None:
        """Cancel the request, unless another gateway answers it.

        A broken connection may be noticed long after its client has continued at another gateway.
        """
        assert self.registration is not None
        try:
            await self.registration
            was_last = await request_registry.unregister(
                self._context.bus, self.bus_id, self._holder
            )
        except DecodeError:
            was_last = False  # A newer gateway has written the record, and may still answer.
        except PagemillError:
            was_last = True  # Without a record no other gateway can answer it.
        if was_last:
            await self._cancel()

    async def _cancel(self) -> None:
        try:
            await client.cancel_all(self._context.bus, self.parts, self.trace)
        except Unavailable as error:
            _log.warning("cancel_failed", request_id=self.bus_id, reason=error.message)

    def _event_id(self, position: Sequence[int]) -> str:
        return format_event_id(position) if self.has_event_ids else ""


async def merge_logs(
    logs: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield records as they arrive, each with the number of its log. Raises the errors of the logs.

    At most MAX_OPEN_LOGS are open, and none is read ahead by more than one record. All readers end
    with the generator.
    """
    waiting: dict[asyncio.Future[T | None], int] = {}
    unopened = iter(range(len(logs)))

    def read_next(part: int) -> None:
        waiting[asyncio.ensure_future(anext(logs[part], None))] = part

    try:
        for part in islice(unopened, MAX_OPEN_LOGS):
            read_next(part)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                part, record = waiting[task], task.result()
                del waiting[task]
                if record is not None:
                    yield part, record
                    read_next(part)
                elif (following := next(unopened, None)) is not None:
                    read_next(following)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for log in logs:
            await log.aclose()


async def find_request(context: AppContext, request: Request, caller: Caller) -> ActiveRequest:
    """Return the request that the path refers to, by its id or by its client's name for it.

    A request without a gateway's record may have come over NATS. Raises NotFound, also for requests
    of other tenants.
    """
    name = request.path_params["id"]
    ids = [named_request_id(kind, name) for kind in context.kinds.values()]
    is_recorded, is_own = False, names.is_own_id(name)
    for request_id in dict.fromkeys([*ids, name] if is_own else ids):
        bus_id = names.scoped_id(request_id, caller.tenant)
        record = await request_registry.find(context.bus, bus_id)
        if record is not None and record.tenant == caller.tenant:
            request.scope["request_id"], is_recorded = (request_id, True), True
            with suppress(DecodeError):
                return ActiveRequest(context, request_id, record, request.scope)
    if is_own and not is_recorded:
        status = await request_status.find(context.bus, names.scoped_id(name, caller.tenant))
        if status.state != "unknown":
            request.scope["request_id"] = name, True
            record = _record_of(context, status, caller.tenant)
            return ActiveRequest(context, name, record, request.scope)
    raise NotFound("there is no such request, or it has been removed", field="id")


def _record_of(context: AppContext, status: RequestStatus, tenant: str) -> RequestRecord:
    """Return a record of a request that was published over NATS."""
    times_ms = [span.received_ms for span in status.path]
    times_ms += [attempt.began_ms for attempt in status.attempts]
    return RequestRecord(
        LOG.name,
        status.model or "",
        tenant,
        int(min(times_ms, default=context.bus.now_ms()) / 1000),
        durable=True,
        # The time limit in the request itself is at most this.
        timeout_s=context.config.delivery.max_timeout_s,
    )
