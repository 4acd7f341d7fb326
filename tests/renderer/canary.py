"""A real server that counts connections, and fetchers that call it."""

import asyncio
import atexit
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiodns
import pytest

from shared.config.schema import RendererConfig
from tests.renderer.threads import in_thread
from workers.renderer.media.fetcher import Fetcher
from workers.renderer.media.loader import MediaLoader

LOOPBACK = ["127.0.0.0/8"]


class Canary:
    """A real server; `answers` has its reaction to each path."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.connections = 0
        self.paths: list[str] = []
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        canary = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                canary.connections += 1
                super().setup()

            def do_GET(self) -> None:
                canary.paths.append(self.path)
                answer = canary.answers.get(urlsplit(self.path).path, send(b"picture"))
                answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

            def server_bind(self) -> None:
                if ":" in address:  # and with it every IPv4 address
                    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                super().server_bind()

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server((address, 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


Answer = Callable[[BaseHTTPRequestHandler], None]


def send(body: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def config(networks: list[str] | None = None, **settings: object) -> RendererConfig:
    settings = {"media_hosts": ["*"], "fetch_timeout_s": 1.0} | settings
    return RendererConfig(media_networks=networks or [], **settings)  # type: ignore[arg-type]


RUNNER = asyncio.Runner()
atexit.register(RUNNER.close)


class Blocking:
    """A fetcher or a loader for tests without a loop."""

    def __init__(self, reader: Fetcher | MediaLoader) -> None:
        self._reader = reader

    def fetch(self, *args: Any) -> bytes:
        assert isinstance(self._reader, Fetcher)
        return RUNNER.run(self._reader.fetch(*args))

    def read(self, *args: Any) -> bytes:
        assert isinstance(self._reader, MediaLoader)
        return RUNNER.run(self._reader.read(*args))


def fetcher(networks: list[str] | None = None, **settings: object) -> Blocking:
    return Blocking(Fetcher(config(networks, **settings)))


def loader(limits: RendererConfig) -> Blocking:
    return Blocking(MediaLoader(limits, in_thread))


def resolve_as(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Resolve names to each of `answers` in turn, and return the resolved names."""
    hosts: list[str] = []

    async def getaddrinfo(_: object, host: str, **options: object) -> Any:
        hosts.append(host)
        addresses = answers[min(len(hosts), len(answers)) - 1]
        return SimpleNamespace(nodes=[SimpleNamespace(addr=(a.encode(), 0)) for a in addresses])

    monkeypatch.setattr(aiodns.DNSResolver, "getaddrinfo", getaddrinfo)
    return hosts
