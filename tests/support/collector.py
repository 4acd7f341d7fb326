"""A collector of traces: a receiver of OTLP over HTTP, which decodes the spans."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Keeps the received spans, and holds every answer while `is_answering` is not set."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_requests = 0
        self.is_answering = threading.Event()
        self.is_answering.set()
        self.url = ""

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]

    def add(self, body: bytes) -> None:
        self.num_requests += 1
        if not self.is_answering.is_set():
            self.is_answering.wait(60)
            return
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/x-protobuf"
            collector.add(self.rfile.read(int(self.headers["Content-Length"])))
            with contextlib.suppress(ConnectionError):  # The sender may have given up.
                self.send_response(200)
                self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.5})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield collector
    finally:
        collector.is_answering.set()
        server.shutdown()
        thread.join()
        server.server_close()


def attributes_of(span: Span) -> dict[str, str | int]:
    """Return the attributes, which are texts and whole numbers."""
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}
