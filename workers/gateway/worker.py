"""Gateway worker: HTTP in front of the same subjects that every other client uses.

Gateways are stateless. Answers are assembled from token logs, so when a gateway dies another one
continues from the same log.
"""

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
from starlette.routing import Route

from shared.bus.bus import Bus
from shared.config.schema import GatewayConfig
from shared.errors import ConfigError
from shared.net.listening import listen
from shared.stage.runtime import Context
from workers.gateway.app import AppContext, build_application
from workers.gateway.http.accepting import Acceptor
from workers.gateway.http.connection import ConnectionLimits, LimitedHttpProtocol
from workers.gateway.http.places import ConnectionPlaces
from workers.gateway.openapi.document import KINDS, TABLES
from workers.gateway.routes import page

BACKLOG = 1024
# Time to send the final error to the clients that still wait when the drain is over.
FINAL_ERROR_S = 1.0
KEEP_ALIVE_S = 30
# File descriptors for everything but accepted connections. Connections over the limit need some.
OTHER_FILES = 192


async def main(context: Context) -> None:
    config = context.config.gateway
    app = AppContext(context.bus, context.config, context.metrics, context.worker, KINDS)
    context.reloader.takers.append(app.reload)
    listener = context.listeners.take("gateway")
    assert listener is not None, "a gateway always has an address"
    with listener:
        num_connections = _max_connections(config.max_connections)
        if num_connections < config.max_connections:
            context.log.warning("fewer_connections", max_connections=num_connections)
        limits = ConnectionLimits(
            config,
            ConnectionPlaces(num_connections, config.api_keys),
            refused=context.metrics.counter("http_connections_refused_total"),
            displaced=context.metrics.counter("http_connections_displaced_total"),
            slow=context.metrics.counter("http_slow_clients_total"),
        )
        context.reloader.takers.append(lambda new: limits.places.set_keys(new.gateway.api_keys))
        server = _server(app, limits)
        listen("gateway", listener, BACKLOG)
        listener.setblocking(False)
        serving = asyncio.create_task(server.serve([listener]))
        context.url = _url(config, listener, context.bus)
        context.log.info("listening", url=context.url)
        context.ready(
            sorted(context.config.models),
            lambda: {"connections": float(len(server.server_state.connections))},
        )
        stopping = asyncio.create_task(context.shutdown.asked.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        app.draining = server.should_exit = True
        drain_s = context.config.delivery.drain_s
        await context.shutdown.drained({serving}, drain_s)
        app.shutting_down.set()
        await asyncio.wait({serving}, timeout=FINAL_ERROR_S)
        server.force_exit = True
        await serving
        await app.close()


def all_routes(app: AppContext) -> list[Route]:
    routes = [route for table in TABLES for route in table.routes(app)]
    return routes + page.routes(app)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self.servers = []
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the listeners as uvicorn does, but with places for connections, and with TLS
        handshakes that have a time limit: uvicorn has neither."""
        connection = partial(
            cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for listener in sockets or ():
            acceptor = Acceptor(self._limits, listener, self.config.ssl, connection)
            self.servers.append(cast(asyncio.Server, acceptor))
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the worker, which asks the server to stop."""
        yield


def _server(app: AppContext, limits: ConnectionLimits) -> _Server:
    config = uvicorn.Config(
        build_application(app, all_routes(app)),
        # uvicorn expects a class here, and does nothing with it but call it.
        http=cast(type[asyncio.Protocol], partial(LimitedHttpProtocol, limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    config.ssl = _tls(app.limits)
    return _Server(config, limits)


def _max_connections(num_connections: int) -> int:
    """Return how many connections the process has file descriptors for, at most `num_connections`.

    Raises the soft limit of the process as far as the hard limit allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + OTHER_FILES
    if 0 <= soft < needed:
        soft = needed if hard < 0 else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return num_connections if soft < 0 else max(1, min(num_connections, soft - OTHER_FILES))


def _url(config: GatewayConfig, listener: socket.socket, bus: Bus) -> str:
    host, port = listener.getsockname()[:2]
    host = bus.address_of(host)
    host = f"[{host}]" if ":" in host else host
    return f"http{'' if config.tls_cert is None else 's'}://{host}:{port}"


def _tls(config: GatewayConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:
        raise ConfigError(
            f"gateway.tls_cert: {config.tls_cert} and {config.tls_key} cannot be used:"
            f" {error.strerror}",
            field="gateway.tls_cert",
        ) from error
    return context
