"""The address that a gateway publishes."""

from types import SimpleNamespace
from typing import Any

import pytest

from shared.bus import bus as bus_module
from shared.bus.bus import Bus
from shared.bus.connection import Connection
from shared.config.schema import GatewayConfig
from shared.net.listening import bind
from workers.gateway.worker import _url


@pytest.mark.parametrize(
    ("listen", "host"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "10.1.2.3"), ("::", "10.1.2.3")]
)
def test_a_gateway_that_listens_everywhere_publishes_the_address_of_its_broker_connection(
    monkeypatch: pytest.MonkeyPatch, listen: str, host: str
) -> None:
    monkeypatch.setattr(bus_module, "local_address", lambda _: "10.1.2.3")
    nc = SimpleNamespace(jetstream=lambda timeout: None, inbox=None)
    connection: Any = Connection(nc)  # type: ignore[arg-type]
    config = GatewayConfig(listen=listen, port=0, allow_anonymous=True)
    with bind("gateway", listen, 0) as listener:
        port = listener.getsockname()[1]
        assert _url(config, listener, Bus(connection)) == f"http://{host}:{port}"
