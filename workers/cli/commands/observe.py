"""Commands that watch a cluster: `pagemill top` and `pagemill metrics`."""

from typing import Annotated

import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number

from workers.cli.metrics import print_metrics, serve_metrics
from workers.cli.options import ConfigFile, NatsUrl, find_url
from workers.cli.top import watch


def top(
    *,
    once: bool = False,
    json: bool = False,
    interval: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Watch a running Pagemill: pools, queues, tokens a second, KV use, latencies. Ctrl-C ends it.

    Parameters
    ----------
    once
        Print one frame, after one interval, and end.
    json
        Print one JSON object a frame.
    interval
        Seconds between two frames.
    """
    return uvloop.run(watch(find_url(config, nats), interval, once=once, as_json=json))


def metrics(*, listen: str | None = None, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Print the metrics of all workers and queues in Prometheus' text format.

    Parameters
    ----------
    listen
        Serve them over HTTP instead, on this address and port, such as 127.0.0.1:9400.
    """
    url = find_url(config, nats)
    return uvloop.run(print_metrics(url) if listen is None else serve_metrics(url, listen))
