"""docs/reference/metrics.md, from `shared.telemetry.catalog`."""

from pathlib import Path

from ops.docs.tables import REFERENCE
from shared.telemetry.catalog import METRICS, PREFIX, MetricSpec

FILE = REFERENCE / "metrics.md"

INTRODUCTION = """\
# Metrics

Written by `make docs` from `shared/telemetry/catalog.py`; do not edit by hand. Commands, Prometheus
and advice are in [operate/metrics.md](../operate/metrics.md).

Each series has the labels `model` (empty if it belongs to no model), `role` and `worker`, and the
labels of the table. Times since a request's acceptance use the broker's clock, so the clocks of
machines do not matter; they are accurate to about a millisecond.

| name | kind | labels | reported by | description |
|---|---|---|---|---|
"""


def pages() -> dict[Path, str]:
    return {FILE: INTRODUCTION + "".join(_row(spec) for spec in METRICS.values())}


def _row(spec: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return (
        f"| `{PREFIX}{spec.name}` | {spec.kind} | {labels} | {spec.source} | {spec.description} |\n"
    )
