"""A nats-server for as long as a block of a test runs, and the state of a connection to it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer


@contextlib.contextmanager
def running_broker(folder: Path, **settings: Any) -> Iterator[EmbeddedServer]:
    """Run a server that stores in a folder. `settings` are arguments of EmbeddedServer."""
    server = EmbeddedServer(folder, **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def create_tenant_queues(bus: Bus) -> None:
    """Create the queues of the broker's tenants, as a coordinator does."""
    await bus.streams.find_tenants()
    await bus.streams.create_for_tenants(await request_queue.streams_of_tenants(bus))


def break_connection(bus: Bus) -> None:
    """Close the socket of a connection, as when the broker is lost."""
    transport = bus.connection.nc._transport
    assert transport is not None
    transport.close()


def subscriptions_of(bus: Bus) -> set[int]:
    """Return the ids of a connection's subscriptions."""
    return set(bus.connection.nc._subs)
