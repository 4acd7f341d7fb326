import socket
from collections.abc import Iterator
from typing import Any

import httpcore2
import pytest

from tests.renderer.canary import Canary


@pytest.fixture
def canary() -> Iterator[Canary]:
    server = Canary()
    yield server
    server.close()


@pytest.fixture
def canary_everywhere() -> Iterator[Canary]:
    """On every address of this machine, in either family."""
    server = Canary("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    yield server
    server.close()


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which connections were tried."""
    tried: list[str] = []
    really = httpcore2.AnyIOBackend.connect_tcp

    async def connect_tcp(self: Any, host: str, *args: Any) -> httpcore2.AsyncNetworkStream:
        tried.append(host)
        return await really(self, host, *args)

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    return tried
