import socket
from collections.abc import Iterator

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
    really = httpcore2.SyncBackend.connect_tcp

    def connect_tcp(self: object, host: str, *args: object) -> httpcore2.NetworkStream:
        tried.append(host)
        return really(self, host, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(httpcore2.SyncBackend, "connect_tcp", connect_tcp)
    return tried
