"""Export of spans over OTLP, by OpenTelemetry's exporter.

The libraries are the extra `pagemill[otel]`, so this module is imported only with
`tracing.otlp_url`.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from workers.coordinator.trace_spans import PROVIDER, Span

# A collector that does not answer costs one thread for this long.
TIMEOUT_S = 5.0

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class SpanExporter:
    """Sends spans to a collector from a thread, one batch at a time."""

    def __init__(self, url: str, version: str) -> None:
        # The exporter logs each failure as text, which does not belong into a log of JSON lines.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        logging.getLogger("opentelemetry").propagate = False
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        attributes = {"service.name": PROVIDER, "service.version": version}
        self._resource = Resource.create(attributes)
        self._scope = InstrumentationScope(PROVIDER, version)

    async def export(self, spans: Sequence[Span]) -> bool:
        """Send spans, and return whether the collector has accepted them."""
        accepted: Future[bool] = Future()
        accepted.set_running_or_notify_cancel()  # A caller that leaves does not stop the thread.

        def run() -> None:
            try:
                result = self._exporter.export([self._convert(span) for span in spans])
            except Exception:
                # The exporter and its libraries may raise any error, and `export` waits for a
                # result. Its caller counts and logs the spans that are lost.
                result = SpanExportResult.FAILURE
            accepted.set_result(result is SpanExportResult.SUCCESS)

        # The end of the process does not wait for a daemon.
        threading.Thread(target=run, daemon=True, name="traces").start()
        return await asyncio.wrap_future(accepted)

    def _convert(self, span: Span) -> ReadableSpan:
        state = TraceState.from_header([span.state]) if span.state else None
        parent = None
        if span.parent_id:
            parent = _context(span.trace_id, span.parent_id, state, is_remote=span.is_root)
        error = {"error.type": span.error} if span.error else {}
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id, state),
            parent=parent,
            resource=self._resource,
            attributes={**span.attributes, **error},
            events=[Event(name, timestamp=_ns(ms)) for name, ms in span.events],
            links=[Link(_context(*link)) for link in span.links],
            kind=SpanKind.SERVER if span.is_root else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=_ns(span.start_ms),
            end_time=_ns(span.end_ms),
            instrumentation_scope=self._scope,
        )


def _context(
    trace_id: str, span_id: str, state: TraceState | None = None, *, is_remote: bool = False
) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, _SAMPLED, state)


def _ns(ms: float) -> int:
    return int(ms * 1e6)
