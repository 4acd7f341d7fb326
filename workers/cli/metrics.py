"""`pagemill metrics`: the whole cluster's metrics in Prometheus' text format."""

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
        told = cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
    finally:
        await bus.close()
    sys.stdout.write(to_text(told).decode())
    return 0


async def serve_metrics(url: str, listen: str) -> int:
    """Ask the cluster whenever somebody asks us, until Ctrl-C."""
    host, port = _address(listen)
    bus = await Bus.connect(url, "metrics", CONNECT_TIMEOUT_S)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)

    def collect() -> list[MetricSeries]:
        return asyncio.run_coroutine_threadsafe(_ask(bus), loop).result()

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


async def _ask(bus: Bus) -> list[MetricSeries]:
    """Never raises: that the broker is away is something to tell as well."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            return cluster_snapshot.to_series(await cluster_snapshot.take_snapshot(bus))
    except (PagemillError, TimeoutError):
        return [cluster_snapshot.BROKER_DOWN]


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--listen: {listen!r} is not an address and a port, as 127.0.0.1:9400 is",
            field="listen",
        )
    return host.strip("[]"), int(port)
