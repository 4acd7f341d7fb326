"""Implementation of `pagemill metrics`: the cluster's metrics in Prometheus' text format."""

import asyncio
import signal
import sys

from rich.console import Console

from shared.bus.bus import Bus
from shared.errors import ConfigError, PagemillError
from shared.protocol.messages import MetricSeries
from shared.telemetry import cluster_snapshot
from shared.telemetry.prometheus import MetricsEndpoint, to_text

CONNECT_TIMEOUT_S = 3.0
# Prometheus itself gives up after ten seconds.
SCRAPE_TIMEOUT_S = 5.0


async def print_metrics(url: str) -> int:
    bus = await Bus.connect(url, "metrics", CONNECT_TIMEOUT_S)
    try:
        series = cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
    finally:
        await bus.close()
    sys.stdout.write(to_text(series).decode())
    return 0


async def serve_metrics(url: str, listen: str) -> int:
    """Serve the metrics over HTTP until Ctrl-C; each scrape takes a new snapshot."""
    host, port = _parse_address(listen)
    bus = await Bus.connect(url, "metrics", CONNECT_TIMEOUT_S)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)

    def collect() -> list[MetricSeries]:
        return asyncio.run_coroutine_threadsafe(_collect(bus), loop).result()

    endpoint = None
    try:
        endpoint = MetricsEndpoint(collect, host, port)
        address = ":".join(map(str, endpoint.address))
        Console(stderr=True).print(f"metrics at http://{address}/metrics; Ctrl-C stops")
        await stopping.wait()
    finally:
        if endpoint is not None:
            await asyncio.to_thread(endpoint.close)
        await bus.close()
    return 0


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
