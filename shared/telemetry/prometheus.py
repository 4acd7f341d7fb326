"""Numbers as Prometheus reads them: its text format, over HTTP if that is wanted."""

import errno
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

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


def to_text(told: Iterable[MetricSeries]) -> bytes:
    """In Prometheus' text format. All names must be of the catalogue."""
    return generate_latest(make_registry(lambda: told))


def make_registry(collect: Collect) -> CollectorRegistry:
    """Tells what `collect` returns, each time that it is asked."""
    make_registry = CollectorRegistry()
    # It is not asked at once: nothing else is registered here that it could clash with.
    make_registry.register(_Told(collect))
    return make_registry


class _Told(Collector):
    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        by_name: dict[str, list[MetricSeries]] = {}
        for series in self._collect():
            by_name.setdefault(series.name, []).append(series)
        return [_family(name, all_series) for name, all_series in by_name.items()]


def _family(name: str, all_series: Sequence[MetricSeries]) -> Metric:
    described, full_name = METRICS[name], PREFIX + name
    labels = list(all_series[0].labels)
    if described.kind == "histogram":
        histograms = HistogramMetricFamily(full_name, described.meaning, labels=labels)
        for series in all_series:
            values = [series.labels.get(label, "") for label in labels]
            histograms.add_metric(values, _buckets(series), series.value)
        return histograms
    kind = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
    numbers = kind(full_name, described.meaning, labels=labels)
    for series in all_series:
        numbers.add_metric([series.labels.get(label, "") for label in labels], series.value)
    return numbers


def _buckets(series: MetricSeries) -> list[tuple[str, float]]:
    """Each upper bound, and how many are not above it."""
    bounds = [*(repr(bound) for bound in series.bounds), "+Inf"]
    return list(zip(bounds, accumulate(series.counts), strict=True))


class MetricsEndpoint:
    """An HTTP server in a thread of its own, for whoever may connect to its address."""

    def __init__(self, collect: Collect, host: str, port: int, num_ports: int = 1) -> None:
        """On the first of `num_ports` ports from `port` on that nobody has; 0 takes any free one.

        `collect` is called in the server's threads. Raises ConfigError where it cannot listen.
        """
        self._server = _listen(make_registry(collect), host, port, num_ports)
        self.address = (host, self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _listen(told: CollectorRegistry, host: str, port: int, num_ports: int) -> WSGIServer:
    for candidate in range(port, min(port + num_ports, 65536)) if port else (0,):
        try:
            server, _ = start_http_server(candidate, host, told)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or type(error).__name__
                raise ConfigError(
                    f"metrics cannot be served at {host}, port {candidate}: {reason}",
                    field="metrics.listen",
                ) from error
        else:
            return server
    raise ConfigError(
        f"metrics: no port is free at {host} among {num_ports} from {port} on",
        field="metrics.port",
    )
