"""Writes docs/metrics.md: every metric, its meaning and unit, from `shared.telemetry.catalog`.

A test holds the file equal to what this prints.
"""

from pathlib import Path

from shared.telemetry.catalog import METRICS, PREFIX, Description

FILE = Path(__file__).parent.parent / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

Written by `make docs` from `shared/telemetry/catalog.py`; do not edit by hand.

```
pagemill top                             # in a terminal, once a second; Ctrl-C ends it
pagemill top --once --json               # one frame for a program; without --once one a second
pagemill metrics                         # everything in Prometheus' text format
pagemill metrics --listen 127.0.0.1:9400 # the same over HTTP, asked anew at each scrape
```

All of these ask once, on `pm.metrics`, and every worker answers; the broker tells how its queues
stand. What that costs depends on the number of workers and models, and not on what they do. Who has
no heartbeat is gone from it, and who has one and does not answer within half a second is told of as
silent (`up` is 0).

Prometheus can also ask each worker by itself:

```yaml
metrics: {listen: 127.0.0.1, port: 9401}   # off by default
```

Workers of one machine that share this configuration take a port each: the first gets 9401, the next
the next one that is free, of 64. `port: 0` takes any free port. A worker's heartbeat has the
address. Nobody is asked for a password: listen where only those can connect who may read it. No
number tells what anybody asked, and no label is of a client's choosing: models are those that are
configured, and codes those of `shared/errors.py`.

Names and meanings are those that are usual in the field, with the prefix `pagemill_`. Each series
has the labels `model` (empty where none in particular is meant), `role` and `worker`, and those
that the table names. Times from acceptance are by the broker's clock, so the clocks of machines do
not matter; they are accurate to about a millisecond. A restarted worker counts from zero under
another name.

Rates and quantiles of `pagemill top` are of the time between two looks: TTFT is
`time_to_first_token_seconds`, ITL `inter_token_latency_seconds`. Quantiles are read from histograms
as Prometheus' `histogram_quantile` does, as if each bucket were filled evenly.

## What it costs

An engine adds up what the tokens of a step have in common, so a histogram is touched once for each
distinct value: about 10 µs for a step of 32 sequences, where 32 observations in one histogram of
the client library would take 25 to 31 µs (2 cores, busy with other things, medians).
To be asked costs a worker well below a millisecond by the bus and about 1.5 ms over HTTP. The
library, `prometheus_client`, writes the text and serves it; its global registry is not used.

## All metrics

| name | kind | labels | told by | meaning |
|---|---|---|---|---|
"""


def document() -> str:
    return INTRODUCTION + "".join(_row(described) for described in METRICS.values())


def _row(described: Description) -> str:
    labels = ", ".join(f"`{label}`" for label in described.labels)
    return (
        f"| `{PREFIX}{described.name}` | {described.kind} | {labels} | {described.where}"
        f" | {described.meaning} |\n"
    )


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
