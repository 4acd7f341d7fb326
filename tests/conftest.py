"""One real nats-server per test session, on a free port; a connection for each test.

And a watch over every error that is made in any test: none that may reach a client tells of our
insides.
"""

import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config import DeliveryConfig, NatsConfig
from shared.errors import ConfigError, PagemillError

# Before anything imports Triton, and transformers does. Without a GPU our kernels run in its
# interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# As for workers: before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

INSIDES = re.compile(r"0x[0-9a-f]{6,}|/site-packages/|Traceback|BytesIO|object at ")


@pytest.fixture(autouse=True)
def errors_tell_nothing_of_our_insides(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    told: list[str] = []
    make = PagemillError.__init__

    def watched(self: PagemillError, message: str, *, field: str | None = None) -> None:
        make(self, message, field=field)
        if not isinstance(self, ConfigError):  # which is for the operator, and names files
            told.append(f"{field}: {message}")

    monkeypatch.setattr(PagemillError, "__init__", watched)
    yield
    assert [text for text in told if INSIDES.search(text)] == []


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def bus(broker: EmbeddedServer) -> AsyncIterator[Bus]:
    connection = await Bus.connect(broker.url, "test")
    # Whether it keeps its promises is asked of all servers that there may be, which takes a while.
    await connection.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    yield connection
    await connection.close()
