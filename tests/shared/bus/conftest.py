"""Fixtures of the tests of the bus."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.bus.embedded_server import EmbeddedServer


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that no other test uses."""
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()
