"""Numbers as others read them: Prometheus' text format, over HTTP if that is wanted."""

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
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from shared.catalogue import METRICS, PREFIX
from shared.errors import ConfigError
from shared.metrics import Counter, Histogram, LabelSet, Metrics, Series

Value = tuple[LabelSet, Series | float]


def families(metrics: Metrics) -> list[Metric]:
    """What these are just now."""
    by_name: dict[str, list[Value]] = {}
    for name, labels, series in metrics:
        by_name.setdefault(name, []).append((labels, series))
    return [family(name, values) for name, values in by_name.items()]


def family(name: str, values: Sequence[Value]) -> Metric:
    """One metric of the catalogue with all its series, at least one; their labels have the same
    names."""
    described = METRICS[name]
    label_names = [label for label, _ in values[0][0]]
    full_name = PREFIX + name
    if described.kind == "histogram":
        histograms = HistogramMetricFamily(full_name, described.meaning, labels=label_names)
        for labels, series in values:
            assert isinstance(series, Histogram), name
            histograms.add_metric(_values(labels), _buckets(series), series.total)
        return histograms
    kind = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
    numbers = kind(full_name, described.meaning, labels=label_names)
    for labels, series in values:
        numbers.add_metric(_values(labels), _number(series))
    return numbers


def _values(labels: LabelSet) -> list[str]:
    return [value for _, value in labels]


def _number(series: Series | float) -> float:
    if isinstance(series, Counter):
        return series.value
    assert not isinstance(series, Histogram)
    return series() if callable(series) else series


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bound and how many are not above it."""
    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def merge(told: Iterable[Metric]) -> list[Metric]:
    """Series of the same metric together, as the format wants them."""
    merged: dict[str, Metric] = {}
    for part in told:
        whole = merged.setdefault(part.name, Metric(part.name, part.documentation, part.type))
        whole.samples.extend(part.samples)
    return list(merged.values())


class _Told(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def registry(collect: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """Tells what `collect` returns, each time that it is asked."""
    registry = CollectorRegistry()
    # Without asking at once: nothing else is registered here that it could clash with.
    registry.register(_Told(collect))
    return registry


def text(told: Iterable[Metric]) -> bytes:
    """In Prometheus' text format."""
    return generate_latest(registry(lambda: told))


def parse(data: bytes) -> list[Metric]:
    """Raises ValueError for what is not in Prometheus' text format."""
    return list(text_string_to_metric_families(data.decode()))


class Endpoint:
    """An HTTP server in a thread of its own, for whoever may connect to its address."""

    def __init__(
        self, collect: Callable[[], Iterable[Metric]], host: str, port: int, num_ports: int = 1
    ) -> None:
        """On the first of `num_ports` ports from `port` on that nobody has; 0 takes any free one.

        Raises ConfigError where it cannot listen.
        """
        self._server = _listen(registry(collect), host, port, num_ports)
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
