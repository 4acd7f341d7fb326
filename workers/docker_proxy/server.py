"""The HTTP server of `pagemill docker-proxy`, on a Unix socket.

The autoscaler never has Docker's own socket, which would make it root of the machine.
"""

import contextlib
import math
import os
import platform
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import structlog
import uvicorn

from shared.config.schema import Config
from shared.errors import ConfigError, NotFound, PagemillError
from shared.protocol.encoding import to_json
from shared.stage import signals
from workers.docker_messages import DockerWorker, Refusal
from workers.docker_proxy.engine import Engine
from workers.docker_proxy.project import Project, find_project
from workers.docker_proxy.rules import Action, Refused, read_action
from workers.pools import pools_of

# Beyond the time in which a worker drains: for the end of the process itself.
SPARE_S = 10
SHUTDOWN_S = 2
# An autoscaler needs one, and a health check another; further ones are answered with status 503.
MAX_CONNECTIONS = 64

_log = structlog.get_logger()


class Proxy:
    """ASGI application that lists, starts and stops the workers of pools."""

    def __init__(self, project: Project) -> None:
        self._project = project

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, body = await self._answer(scope)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            # What follows a refused body is no request.
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Any) -> tuple[HTTPStatus, bytes]:
        try:
            action = read_action(
                scope["method"],
                scope["raw_path"],
                scope["query_string"],
                scope["headers"],
                self._project.pools,
            )
            return HTTPStatus.OK, to_json(await self._act(action))
        except Refused as refused:
            status, refusal = refused.status, refused.refusal
        except NotFound as error:
            # A container that was removed meanwhile.
            status, refusal = HTTPStatus.NOT_FOUND, Refusal("worker", error.message)
        except ConfigError as error:
            status, refusal = HTTPStatus.CONFLICT, Refusal("definition", error.message)
        except PagemillError as error:
            status, refusal = HTTPStatus.BAD_GATEWAY, Refusal("docker", error.message)
        _log.warning("refused", kind=refusal.kind, reason=refusal.message)
        return status, to_json(refusal)

    async def _act(self, action: Action) -> list[DockerWorker]:
        if action.kind == "start":
            await self._project.start(action.service)
        elif action.kind == "stop":
            await self._project.stop(action.service, action.number)
        return await self._project.workers(action.service)


class Server(uvicorn.Server):
    """A server that ends at a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        signals.set_handlers(self._stop, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True


def new_server(project: Project, socket: str) -> Server:
    config = uvicorn.Config(
        Proxy(project),
        uds=socket,
        # Its headers have a limit of 16 KiB, those of uvicorn's other parser have none.
        http="h11",
        limit_concurrency=MAX_CONNECTIONS,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return Server(config)


async def run(config: Config, docker_socket: str, project: str | None) -> None:
    """Serve until a signal. `project` is by default that of this process's container.

    Raises ConfigError for what will never work, and Unavailable without an engine.
    """
    services = pools_of(config).by_service()
    if not services:
        raise ConfigError("scale.pools: the configuration has no pools", field="scale.pools")
    engine = Engine(docker_socket)
    try:
        await engine.open()
        # A container's host name is its id, unless the compose file says otherwise.
        name = project or await find_project(engine, platform.node())
        grace_s = math.ceil(config.delivery.drain_s) + SPARE_S
        served = Project(engine, name, services, grace_s)
        _check_socket(config.scale.docker_proxy)
        _log.info("serves", project=name, services=sorted(services))
        await new_server(served, config.scale.docker_proxy).serve()
        await served.close()
    finally:
        await engine.close()


def _check_socket(socket: str) -> None:
    """Raise ConfigError unless a socket can be opened there. Other users may connect to it."""
    folder = os.path.dirname(socket)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"scale.docker_proxy: no socket can be opened in the folder {folder}",
            field="scale.docker_proxy",
        )
