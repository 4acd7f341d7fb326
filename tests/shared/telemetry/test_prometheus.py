"""Prometheus' text format, read by its own parser, and the HTTP endpoints."""

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from shared.errors import Unavailable
from shared.net.listening import listen_on_first
from shared.protocol.messages import MetricSeries
from shared.telemetry.catalog import METRICS, PREFIX
from shared.telemetry.metrics import Metrics
from shared.telemetry.prometheus import MetricsEndpoint, to_text

names = st.text(st.characters(codec="utf-8"), max_size=8)
COUNTERS = [d.name for d in METRICS.values() if d.kind == "counter" and not d.labels]
HISTOGRAMS = [d.name for d in METRICS.values() if d.kind == "histogram"]


def samples(data: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    parsed: list[Sample] = [
        sample
        for family in text_string_to_metric_families(data.decode())
        for sample in family.samples
    ]
    values = {(s.name, frozenset(s.labels.items())): s.value for s in parsed}
    assert len(values) == len(parsed), "one series is told twice"
    return values


@given(
    st.lists(st.tuples(st.sampled_from(COUNTERS), names, st.floats(0, 1e12)), max_size=8),
    st.lists(st.tuples(st.sampled_from(HISTOGRAMS), names, st.floats(0, 1e4)), max_size=8),
)
def test_the_prometheus_parser_reads_all_values(
    counted: list[tuple[str, str, float]], observed: list[tuple[str, str, float]]
) -> None:
    metrics = Metrics("engine", "engine-1")
    expected: dict[tuple[str, str, str], float] = {}
    for name, model, amount in counted:
        metrics.of(model).counter(name).add(amount)
        key = (PREFIX + name, model, "")
        expected[key] = expected.get(key, 0.0) + amount
    for name, model, value in observed:
        metrics.of(model).histogram(name).observe(value)
        for bound in [*METRICS[name].bounds, float("inf")]:
            key = (f"{PREFIX}{name}_bucket", model, str(bound))
            expected[key] = expected.get(key, 0.0) + (value <= bound)
    values: dict[tuple[str, str, str], float] = {}
    for (name, labels), value in samples(to_text(metrics.snapshot().series)).items():
        by_name = dict(labels)
        assert (by_name["role"], by_name["worker"]) == ("engine", "engine-1")
        if not name.endswith(("_count", "_sum")):
            values[name, by_name["model"], str(float(by_name["le"])) if "le" in by_name else ""] = (
                value
            )
    assert values == expected


def test_every_metric_of_the_catalog_is_exported() -> None:
    metrics = Metrics("engine", "engine-1", "demo")
    for spec in METRICS.values():
        labels = dict.fromkeys(spec.labels, "x")
        match spec.kind:
            case "counter":
                metrics.counter(spec.name, **labels)
            case "gauge":
                metrics.set_function(spec.name, lambda: 1.5, **labels)
            case "histogram":
                metrics.histogram(spec.name, **labels)
    families = text_string_to_metric_families(to_text(metrics.snapshot().series).decode())
    kinds = {family.name: family.type for family in families}
    assert kinds == {
        PREFIX + name.removesuffix("_total" if spec.kind == "counter" else ""): spec.kind
        for name, spec in METRICS.items()
    }


def dead_letters() -> Iterator[MetricSeries]:
    yield MetricSeries("dead_letters", {}, 3)


def read(endpoint: MetricsEndpoint) -> bytes:
    host, port = endpoint.address
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        data: bytes = answer.read()
        return data


def endpoint_at(port: int, num_ports: int = 1) -> MetricsEndpoint:
    return MetricsEndpoint(dead_letters, listen_on_first("metrics", "127.0.0.1", port, num_ports))


def test_workers_of_one_machine_listen_on_different_ports() -> None:
    first = endpoint_at(0)
    port = first.address[1]
    others = [endpoint_at(port, num_ports=50) for _ in range(2)]
    try:
        ports = [endpoint.address[1] for endpoint in (first, *others)]
        assert ports == sorted(set(ports))
        for endpoint in (first, *others):
            assert samples(read(endpoint)) == {("pagemill_dead_letters", frozenset()): 3}
        with pytest.raises(Unavailable, match=f"port {port} of 127.0.0.1 is in use") as refused:
            endpoint_at(port)
        assert refused.value.field == "metrics.port"
    finally:
        for endpoint in (first, *others):
            endpoint.close()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass
