"""Commands that watch a cluster: `pagemill top` and `pagemill metrics`."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.errors import ConfigError, PagemillError
from shared.net.listening import listen_on_first
from shared.protocol.messages import MetricSeries
from shared.protocol.permissions import METRICS
from shared.telemetry import cluster_snapshot
from shared.telemetry.prometheus import MetricsEndpoint, to_text
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, NatsUrl, find_login, load
from workers.cli.terminal import call_on_signals, errors
from workers.cli.top import watch
from workers.settings import login_of

# Prometheus itself gives up after ten seconds.
SCRAPE_TIMEOUT_S = 5.0


async def top(
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
        Print one frame, after one interval, and exit.
    json
        Print one JSON object per frame.
    interval
        Seconds between two frames.
    """
    return await watch(find_login(config, nats), interval, once=once, as_json=json)


async def metrics(
    *, listen: str | None = None, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print the metrics of all workers and queues in Prometheus' text format.

    Parameters
    ----------
    listen
        Serve the metrics over HTTP instead, on this address and port, such as 127.0.0.1:9400.
    """
    login = _find_login(config, nats)
    if listen is not None:
        address = _parse_address(listen)
        async with connected(login, "metrics", load(config).nats.connect_timeout_s) as bus:
            await _serve_metrics(bus, *address)
        return 0
    async with connected(login, "metrics") as bus:
        series = cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
        sys.stdout.write(to_text(series).decode())
    return 0


def _find_login(config: Path | None, nats: str | None) -> Login:
    """Return the login with the key `metrics`, or of the operator where it has no file."""
    login = login_of(load(config), METRICS, given_url=nats)
    has_key = login.seed_file is not None and login.seed_file.exists()
    return login if has_key else find_login(config, nats)


async def _serve_metrics(bus: Bus, host: str, port: int) -> None:
    """Serve the metrics over HTTP until Ctrl-C; each scrape takes a new snapshot."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    call_on_signals(stopping.set)

    def collect() -> list[MetricSeries]:
        return asyncio.run_coroutine_threadsafe(_collect(bus), loop).result()

    listener = listen_on_first("metrics", host, port, 1)
    endpoint = MetricsEndpoint(collect, listener, {"health": lambda: (True, b"{}")})
    try:
        address = ":".join(map(str, endpoint.address))
        errors.print(f"metrics at http://{address}/metrics; Ctrl-C stops")
        await stopping.wait()
    finally:
        await asyncio.to_thread(endpoint.close)


async def _collect(bus: Bus) -> list[MetricSeries]:
    """Return the cluster's metrics, or the metric that says that the broker is down."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            return cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
    except (PagemillError, TimeoutError):
        return [cluster_snapshot.BROKER_DOWN]


def _parse_address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--listen: {listen!r} is not an address and a port such as 127.0.0.1:9400",
            field="listen",
        )
    return host.strip("[]"), int(port)
