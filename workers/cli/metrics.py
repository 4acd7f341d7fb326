"""Implementation of `pagemill metrics`: the cluster's metrics in Prometheus' text format."""

import asyncio
import sys

from shared.bus.bus import Bus
from shared.errors import ConfigError, PagemillError
from shared.protocol.messages import MetricSeries
from shared.telemetry import cluster_snapshot
from shared.telemetry.prometheus import MetricsEndpoint, to_text
from workers.cli.terminal import call_on_signals, connected, errors

# Prometheus itself gives up after ten seconds.
SCRAPE_TIMEOUT_S = 5.0


async def print_metrics(url: str) -> int:
    async with connected(url, "metrics") as bus:
        series = cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
    sys.stdout.write(to_text(series).decode())
    return 0


async def serve_metrics(url: str, listen: str) -> int:
    """Serve the metrics over HTTP until Ctrl-C; each scrape takes a new snapshot."""
    host, port = _parse_address(listen)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    async with connected(url, "metrics") as bus:

        def collect() -> list[MetricSeries]:
            return asyncio.run_coroutine_threadsafe(_collect(bus), loop).result()

        call_on_signals(stopping.set)
        endpoint = MetricsEndpoint(collect, host, port)
        try:
            address = ":".join(map(str, endpoint.address))
            errors.print(f"metrics at http://{address}/metrics; Ctrl-C stops")
            await stopping.wait()
        finally:
            await asyncio.to_thread(endpoint.close)
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
