"""A broker alone: what gateways store needs no worker."""

from collections.abc import AsyncIterator

import pytest

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig


@pytest.fixture
async def bus(broker: EmbeddedServer) -> AsyncIterator[Bus]:
    connection = await Bus.connect(broker.url, "test")
    await connection.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    yield connection
    await connection.close()
