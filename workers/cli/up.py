"""Implementation of `pagemill up`: all roles on this machine until a signal drains them."""

import asyncio
import contextlib

from shared.errors import PagemillError
from workers.cli.local_cluster import LocalCluster
from workers.cli.terminal import call_on_signals, errors


async def run_until_stopped(cluster: LocalCluster) -> int:
    """Run the cluster and return the exit code. Raises ConfigError or Unavailable at the start."""
    stopping = asyncio.Event()

    def stop_or_requeue() -> None:
        if stopping.is_set():
            cluster.requeue_now()
        stopping.set()

    call_on_signals(stop_or_requeue)
    start = asyncio.create_task(cluster.start())
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            errors.print(
                f"[bold green]ready[/] at {cluster.url} and {cluster.gateway_url};"
                " Ctrl-C drains and stops",
                soft_wrap=True,
            )
            await stop
        errors.print("draining …")
    finally:
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError, PagemillError):
            await start
        await cluster.stop()
    return 0
