"""Export of metrics in Prometheus' text format, optionally over HTTP."""

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shared.errors import ConfigError
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
        host: str,
        port: int,
        num_ports: int = 1,
        probes: Mapping[str, Probe] = MappingProxyType({}),
    ) -> None:
        """Listen on the first free port of `num_ports` ports from `port` on; 0 selects a free port.

        Every path serves the metrics, except the paths in `probes`. `collect` and the probes are
        called in the server's threads. Raises ConfigError if no port can be opened.
        """
        self._server = _listen(make_registry(collect), host, port, num_ports)
        metrics = self._server.get_app()
        assert metrics is not None
        self._server.set_app(_with_probes(metrics, probes))
        self.address = (host, self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


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


def _listen(registry: CollectorRegistry, host: str, port: int, num_ports: int) -> WSGIServer:
    for candidate in range(port, min(port + num_ports, 65536)) if port else (0,):
        try:
            server, _ = start_http_server(candidate, host, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or type(error).__name__
                raise ConfigError(
                    f"metrics cannot be served on {host}, port {candidate}: {reason}",
                    field="metrics.listen",
                ) from error
        else:
            return server
    raise ConfigError(
        f"metrics: none of the {num_ports} ports from {port} on is free on {host}",
        field="metrics.port",
    )
