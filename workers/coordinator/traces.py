"""Traces: the spans of ended requests, made by coordinators and sent to a collector over OTLP.

A coordinator that accepts a sampled request first stores the request's trace in the stream of
attempts. All coordinators share one durable consumer of this stream, and a message stays in it
until the request has ended and its spans were exported or counted as dropped. So a request has
spans however it ends and whichever workers and coordinators are killed, the spans are made by one
process at a time, and the cost depends on the sampled requests alone. If a coordinator is killed
between an export and its acknowledgement, the spans are exported again with the same ids. A second
consumer does the same for the orders of batches.

Spans are made after the end of a request, and sent from a thread. Neither a slow collector nor an
absent one delays a request: the queue of spans has a limit, beyond which they are dropped.
"""

import asyncio
from typing import NamedTuple

import structlog

from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.errors import ConfigError, PagemillError
from shared.protocol import names, subjects
from shared.protocol.batch_log import decode_batch_begun
from shared.protocol.encoding import to_json
from shared.protocol.messages import AttemptRecord, decode_attempt
from shared.protocol.records import Failure, Finish, TokenChunk
from shared.protocol.traces import Trace, is_in, trace_of
from shared.stage.job import Job
from shared.stage.runtime import VERSION, Context
from shared.stage.worker_loop import HandleDelivery, serve
from shared.state.batch_log import open_batch
from shared.state.log_records import decode_record
from shared.state.token_log import last_record
from shared.telemetry import logs
from workers.coordinator.trace_spans import Ended, Span, batch_context, batch_root, spans_of

CAPACITY = 1024
"""Limit on the messages in flight of one coordinator."""
MAX_QUEUED = 512
"""Limit on the requests with spans that wait for their export."""
MAX_BATCH = 128
"""Limit on the requests of one export."""
# Longer than all exports of a full queue take with a collector that does not answer.
ACK_WAIT_S = 60.0
RETRY_S = 5.0
# A request that runs for long is looked at less often.
FIRST_LOOK_S, MAX_LOOK_S = 1.0, 15.0
# The replica that serves reads may lag.
SETTLE_S = 0.25
# Time after the longest deadline by which every request has ended.
GRACE_S = 60.0

_log = structlog.get_logger()


class Traces:
    """Stores the traces of accepted requests, and exports the spans of ended ones."""

    def __init__(self, context: Context) -> None:
        """Raises ConfigError if spans are to be exported and the extra is not installed."""
        self._context, self._bus = context, context.bus
        settings = context.config.tracing
        self._is_exporting = settings.otlp_url is not None
        self._ratio = settings.ratio if self._is_exporting else 0.0
        if settings.otlp_url is None:
            return
        try:
            from workers.coordinator.trace_export import SpanExporter
        except ModuleNotFoundError as error:
            raise ConfigError(
                "tracing.otlp_url: traces require the extra `otel`: pip install 'pagemill[otel]'",
                field="tracing.otlp_url",
            ) from error
        self._exporter = SpanExporter(settings.otlp_url, VERSION)
        self._queue: asyncio.Queue[_Exportable] = asyncio.Queue(MAX_QUEUED)
        self._exported = context.metrics.counter("trace_spans_exported_total")
        self._dropped = context.metrics.counter("trace_spans_dropped_total")
        self._has_failed = False

    async def begin(self, job: Job) -> Trace | None:
        """Return the trace of a request, and store it if it is sampled. Raises Unavailable.

        It is also in further log events of this task.
        """
        delivery = job.delivery
        trace = self._find(job, delivery.stored_ms)
        if trace is not None and trace.is_sampled and self._is_exporting:
            model = subjects.model_of_request(delivery.subject)
            stage, worker = self._context.stage.name, self._context.worker
            record = AttemptRecord(
                stage, worker, delivery.attempt, job.received_ms, 0, model=model, trace=trace
            )
            subject = subjects.attempts(job.request_id or "")
            await self._bus.publish_without_id(subject, to_json(record))
        return trace

    def bind(self, job: Job) -> None:
        """Add the trace of a cancelled request to further log events of this task."""
        self._find(job, 0.0)

    def _find(self, job: Job, accepted_ms: float) -> Trace | None:
        trace = trace_of(job.delivery.headers, job.request_id or "", self._ratio, accepted_ms)
        logs.bind_trace(None if trace is None else trace.trace_id)
        return trace

    async def run(self) -> None:
        """Export the spans of ended requests until the drain."""
        if not self._is_exporting:
            return
        exporting = asyncio.create_task(self._export_forever())
        try:
            await asyncio.gather(
                self._serve(
                    subjects.ATTEMPTS_STREAM, subjects.ATTEMPTS_FILTER, self._handle_attempt
                ),
                self._serve(subjects.BATCHES_STREAM, subjects.BATCHES_BEGUN, self._handle_batch),
            )
        finally:
            exporting.cancel()

    async def _serve(self, stream: str, subject: str, handle: HandleDelivery) -> None:
        while True:
            try:
                consumer = await self._bus.queues.consume(
                    stream, subjects.TRACES_CONSUMER, subject, CAPACITY, ACK_WAIT_S
                )
                break
            except PagemillError as error:
                _log.warning("traces_not_read", stream=stream, reason=str(error))
                await asyncio.sleep(RETRY_S)

        async def try_to_handle(delivery: Delivery) -> None:
            try:
                await handle(delivery)
            except PagemillError:
                await delivery.retry(RETRY_S)

        await serve(consumer, try_to_handle, self._context.shutdown, drain_s=0.0)

    async def _handle_attempt(self, delivery: Delivery) -> None:
        """Queue the spans of a message's request, or return the message if it has not ended."""
        record = decode_attempt(delivery.data)
        if record is None or record.trace is None:
            await delivery.ack()
            return
        ended = await read_ended(self._bus, subjects.last_token(delivery.subject), record.trace)
        age_s = (self._bus.now_ms() - record.trace.accepted_ms) / 1000
        if ended is None and age_s < self._context.config.delivery.max_timeout_s + GRACE_S:
            await delivery.retry(_pause_s(age_s))
        elif ended is None:
            self._drop(1, "the log of a request has been removed")
            await delivery.ack()
        elif delivery.sequence != ended.sequence:
            await delivery.ack()  # Another message about the same request has come first.
        elif self._bus.now_ms() < ended.end_ms + 1000 * SETTLE_S:
            await delivery.retry(SETTLE_S)
        else:
            await self._enqueue(_Exportable(delivery, spans_of(ended)))

    async def _handle_batch(self, delivery: Delivery) -> None:
        """Queue the span of a batch, or return the message if the batch has not ended."""
        begun = decode_batch_begun(delivery.data)
        batch_id = "" if begun is None else names.scoped_id(begun.batch_id, begun.tenant)
        if begun is None or not is_in(batch_context(batch_id)[0], self._ratio):
            await delivery.ack()
            return
        log = await open_batch(self._bus, begun.tenant, begun.batch_id)
        if log is None:
            await delivery.ack()  # It is not stored any more.
        elif (end := log.state.ended) is None:
            await delivery.retry(_pause_s((self._bus.now_ms() - delivery.stored_ms) / 1000))
        else:
            end_ms = max(1000.0 * end.at_s, delivery.stored_ms)
            span = batch_root(batch_id, delivery.stored_ms, end_ms, end.status)
            await self._enqueue(_Exportable(delivery, [span]))

    async def _enqueue(self, exportable: "_Exportable") -> None:
        try:
            self._queue.put_nowait(exportable)
        except asyncio.QueueFull:
            self._drop(len(exportable.spans), f"{MAX_QUEUED} requests wait for an export")
            await exportable.delivery.ack()

    async def _export_forever(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            spans = [span for exportable in batch for span in exportable.spans]
            if await self._exporter.export(spans):
                self._exported.add(len(spans))
                self._has_failed = False
            else:
                self._drop(len(spans), "the collector has not accepted them")
            await asyncio.gather(*(exportable.delivery.ack() for exportable in batch))

    def _drop(self, num_spans: int, reason: str) -> None:
        """Count dropped spans. The first ones after an export that succeeded are logged."""
        self._dropped.add(num_spans)
        if not self._has_failed:
            _log.warning("spans_dropped", spans=num_spans, reason=reason)
        self._has_failed = True


class _Exportable(NamedTuple):
    """Spans of a request or a batch, and the message that is settled after their export."""

    delivery: Delivery
    spans: list[Span]


def _pause_s(age_s: float) -> float:
    """Return the pause before the next look at a request or a batch of this age."""
    return min(max(FIRST_LOOK_S, age_s / 2), MAX_LOOK_S)


async def read_ended(bus: Bus, request_id: str, trace: Trace) -> Ended | None:
    """Return the data of a request that has ended; None while it has not. Raises Unavailable.

    A request may have been accepted several times, by coordinators that were killed meanwhile. The
    sequence belongs to the first message with `trace`.
    """
    last = await last_record(bus, request_id)
    if not isinstance(last, Finish | Failure):
        return None
    log = subjects.TOKENS_STREAM, subjects.tokens(request_id)
    end = await bus.read_last(*log)
    first = await bus.read_next(log[0], 1, log[1])
    stored = await bus.read(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    decoded = [(decode_attempt(message.data), message) for message in stored]
    attempts = [(record, message) for record, message in decoded if record is not None]
    same = [message for record, message in attempts if record.trace == trace]
    first_record = None if first is None else decode_record(first.data)
    has_tokens = isinstance(first_record, TokenChunk)
    return Ended(
        request_id,
        trace,
        same[0].sequence if same else 0,
        last,
        end_ms=trace.accepted_ms if end is None else end.stored_ms,
        first_ms=first.stored_ms if first is not None and has_tokens else None,
        is_embedding=isinstance(first_record, TokenChunk) and first_record.embedding is not None,
        attempts=[(record, message.stored_ms) for record, message in attempts],
    )
