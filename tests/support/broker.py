"""A nats-server for as long as a block of a test runs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
