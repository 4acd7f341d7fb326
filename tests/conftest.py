"""One real nats-server per test session, on a free port; a connection for each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from shared.broker import Broker
from shared.bus import Bus
from shared.config import DeliveryConfig, NatsConfig


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    server = Broker(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[Bus]:
    connection = await Bus.connect(broker.url, "test")
    await connection.prepare(NatsConfig(), DeliveryConfig())
    yield connection
    await connection.close()
