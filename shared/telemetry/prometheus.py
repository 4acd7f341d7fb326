"""Export of metrics in Prometheus' text format, optionally over HTTP."""

import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from socketserver import ThreadingMixIn
from types import MappingProxyType
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shared.protocol.messages import MetricSeries
from shared.telemetry.catalog import METRICS, PREFIX

Collect = Callable[[], Iterable[MetricSeries]]
Probe = Callable[[], tuple[bool, bytes]]
"""Returns whether a check has succeeded, and its status as JSON."""


def to_text(series: Iterable[MetricSeries]) -> bytes:
    """Format series as Prometheus text. All names must be in the catalog."""
    return generate_latest(make_registry(lambda: series))


def make_registry(collect: Collect) -> CollectorRegistry:
    """Return a registry that calls `collect` for each scrape."""
    registry = CollectorRegistry()
    # Registration does not call `collect`. Names cannot clash, because there is no other collector.
    registry.register(_SeriesCollector(collect))
    return registry


class _SeriesCollector(Collector):
    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        by_name: dict[str, list[MetricSeries]] = {}
        for series in self._collect():
            by_name.setdefault(series.name, []).append(series)
        return [_family(name, all_series) for name, all_series in by_name.items()]


def _family(name: str, all_series: Sequence[MetricSeries]) -> Metric:
    spec, full_name = METRICS[name], PREFIX + name
    labels = list(all_series[0].labels)
    if spec.kind == "histogram":
        histograms = HistogramMetricFamily(full_name, spec.description, labels=labels)
        for series in all_series:
            values = [series.labels.get(label, "") for label in labels]
            histograms.add_metric(values, _buckets(series), series.value)
        return histograms
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    numbers = kind(full_name, spec.description, labels=labels)
    for series in all_series:
        numbers.add_metric([series.labels.get(label, "") for label in labels], series.value)
    return numbers


def _buckets(series: MetricSeries) -> list[tuple[str, float]]:
    """Return each upper bound with the number of values up to it."""
    bounds = [*(repr(bound) for bound in series.bounds), "+Inf"]
    return list(zip(bounds, accumulate(series.counts), strict=True))


class MetricsEndpoint:
    """HTTP server in its own thread, without authentication."""

    def __init__(
        self,
        collect: Collect,
        listener: socket.socket,
        probes: Mapping[str, Probe] = MappingProxyType({}),
    ) -> None:
        """Serve on a socket that listens, and close it at the end.

        Every path serves the metrics, except the paths in `probes`. `collect` and the probes are
        called in the server's threads.
        """
        host, port, *_ = listener.getsockname()
        self.address: tuple[str, int] = (host, port)
        app = _with_probes(make_wsgi_app(make_registry(collect)), probes)
        self._server = _Server(listener, app)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""


class _Server(ThreadingMixIn, WSGIServer):
    """Server on a socket that listens."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: WSGIApplication) -> None:
        address = listener.getsockname()
        super().__init__(address[:2], _QuietHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = address[:2]
        self.setup_environ()
        self.set_app(app)


def _with_probes(metrics: WSGIApplication, probes: Mapping[str, Probe]) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        probe = probes.get(environ["PATH_INFO"].removeprefix("/"))
        if probe is None:
            return metrics(environ, start_response)
        is_ok, body = probe()
        status = "200 OK" if is_ok else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [body]

    return answer
