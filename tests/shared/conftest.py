import secrets
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import pytest

from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.config.schema import BlobsConfig
from shared.net.listening import bind
from shared.protocol.encoding import to_json
from shared.protocol.messages import BlobAddress, Heartbeat

CONFIG = BlobsConfig(arena_mib=64, listen="127.0.0.1")
Advertise = Callable[[BlobAddress], BlobAddress]


class StartBlobs(Protocol):
    """Starts a worker's blobs and publishes the address that `advertise` makes of theirs."""

    async def __call__(self, config: BlobsConfig = ..., advertise: Advertise = ...) -> Blobs: ...


@pytest.fixture
async def start(bus: Bus) -> AsyncIterator[StartBlobs]:
    """Start a worker's blobs, and publish a heartbeat with their address."""
    started: list[Blobs] = []

    async def start(
        config: BlobsConfig = CONFIG,
        advertise: Advertise = lambda address: address,
    ) -> Blobs:
        worker = f"test-{secrets.token_hex(4)}"
        blobs = Blobs(bus, "test", worker, config)
        listen = config.listen
        await blobs.start(None if listen is None else bind("blobs", listen, config.port))
        started.append(blobs)
        beat = Heartbeat("test", worker, "0", 0, [], {}, advertise(blobs.address))
        await bus.heartbeats.publish(worker, to_json(beat))
        return blobs

    yield start
    for blobs in started:
        await blobs.close()
