"""A Docker engine without containers: the calls of its API that the proxy makes, and no others."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PROJECT = "shop"
BUS, DOOR = "net-bus", "net-door"
STOP_S = 30


def inspected(number: int = 1, service: str = "engine", project: str = PROJECT) -> dict[str, Any]:
    """Return what the engine tells of a container of the compose file, shortened."""
    identity = f"{project}{service}{number}".encode().hex().ljust(64, "0")
    return {
        "Id": identity,
        "Created": "2026-11-23T02:00:00Z",
        "Name": f"/{project}_{service}_{number}",
        "Image": "sha256:" + "ab" * 32,
        "State": {"Status": "running", "Pid": 1000 + number},
        "Config": {
            "Hostname": identity[:12],
            "User": "10001:10001",
            "Env": ["CONFIG=there"],
            "Cmd": ["worker", service],
            "Image": "pagemill",
            "StopTimeout": STOP_S,
            "Labels": {
                "com.docker.compose.config-hash": "c0ffee",
                "com.docker.compose.container-number": str(number),
                "com.docker.compose.oneoff": "False",
                "com.docker.compose.project": project,
                "com.docker.compose.service": service,
            },
        },
        "HostConfig": {
            "Binds": [f"{project}_secrets:/run/secrets:ro", "/srv/models:/models:ro"],
            "CapDrop": ["ALL"],
            "NetworkMode": f"{project}_bus",
            "Privileged": False,
            "ReadonlyRootfs": True,
            "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
            "SecurityOpt": ["no-new-privileges:true"],
        },
        "NetworkSettings": {
            "Networks": {
                f"{project}_bus": {
                    "Aliases": [service, identity[:12]],
                    "IPAMConfig": {"IPv4Address": "172.18.0.77"},
                    "NetworkID": BUS,
                    "IPAddress": f"172.18.0.{number}",
                    "GlobalIPv6Address": "",
                }
            }
        },
    }


class FakeEngine:
    """Containers of one engine, by id. Its methods answer as the real engine does."""

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, Any]] = {}
        self.created_s: dict[str, int] = {}
        self.changes: list[str] = []
        """Method and path of every call that changes something."""
        self.stops = asyncio.Event()
        """Set while containers end at a SIGTERM."""
        self.stops.set()
        self.refuses: str | None = None
        """End of the path of calls that fail."""

    def add(
        self,
        number: int = 1,
        service: str = "engine",
        project: str = PROJECT,
        state: str = "running",
        **labels: str,
    ) -> dict[str, Any]:
        return self._store(inspected(number, service, project), state, labels)

    def _store(
        self, container: dict[str, Any], state: str, labels: dict[str, str]
    ) -> dict[str, Any]:
        container["State"]["Status"] = state
        container["Config"]["Labels"] |= labels
        self.containers[container["Id"]] = container
        self.created_s[container["Id"]] = len(self.created_s)
        return container

    def states(self, service: str = "engine") -> dict[str, str]:
        """Return the states of a service's containers of any project, by name."""
        return {
            one["Name"].lstrip("/"): one["State"]["Status"]
            for one in self.containers.values()
            if one["Config"]["Labels"]["com.docker.compose.service"] == service
        }

    @asynccontextmanager
    async def serve(self, socket: Path) -> AsyncIterator[None]:
        prefix, both = "/v1.41", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
        routes = [
            Route("/version", self._version),
            Route(f"{prefix}/containers/json", self._list),
            Route(f"{prefix}/containers/create", self._create, methods=["POST"]),
            Route(f"{prefix}/containers/{{id}}/json", self._inspect),
            Route(f"{prefix}/containers/{{id}}/start", self._start, methods=["POST"]),
            Route(f"{prefix}/containers/{{id}}/stop", self._stop, methods=["POST"]),
            Route(f"{prefix}/containers/{{id}}", self._remove, methods=["DELETE"]),
            Route(f"{prefix}/networks/{{id}}/connect", self._connect, methods=["POST"]),
            Route("/{path:path}", self._unknown, methods=both),
        ]
        app = Starlette(routes=routes)
        config = uvicorn.Config(app, uds=str(socket), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.005)
        try:
            yield
        finally:
            server.should_exit = True
            self.stops.set()
            await serving

    def _fails(self, request: Request) -> Response | None:
        if request.method != "GET":
            self.changes.append(f"{request.method} {request.url.path}")
        if self.refuses is not None and request.url.path.endswith(self.refuses):
            return JSONResponse({"message": "no space left on device"}, 500)
        identity = request.path_params.get("id")
        if identity is not None and identity not in (*self.containers, BUS, DOOR):
            return JSONResponse({"message": f"No such container: {identity}"}, 404)
        return None

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"ApiVersion": "1.41", "MinAPIVersion": "1.12"})

    async def _unknown(self, request: Request) -> Response:
        raise AssertionError(f"the proxy has no right to {request.method} {request.url.path}")

    async def _list(self, request: Request) -> Response:
        assert request.query_params["all"] == "1"
        wanted = json.loads(request.query_params["filters"])["label"]
        labels = {id: one["Config"]["Labels"] for id, one in self.containers.items()}
        found = [
            {
                "Id": id,
                "State": self.containers[id]["State"]["Status"],
                "Created": self.created_s[id],
                "Labels": labels[id],
                "NetworkSettings": self.containers[id]["NetworkSettings"],
            }
            for id in self.containers
            if set(wanted) <= {f"{name}={value}" for name, value in labels[id].items()}
        ]
        return JSONResponse(found)

    async def _inspect(self, request: Request) -> Response:
        return self._fails(request) or JSONResponse(self.containers[request.path_params["id"]])

    async def _create(self, request: Request) -> Response:
        if (failure := self._fails(request)) is not None:
            return failure
        body, name = await request.json(), f"/{request.query_params['name']}"
        if any(one["Name"] == name for one in self.containers.values()):
            return JSONResponse({"message": f"Conflict. The name {name} is in use"}, 409)
        identity = f"{len(self.created_s):064x}"
        container = {
            "Id": identity,
            "Name": name,
            "Image": body["Image"],
            "State": {"Status": "created", "Pid": 0},
            "Config": {k: v for k, v in body.items() if k not in ("HostConfig", "NetworkingConfig")}
            | {"Hostname": body.get("Hostname", identity[:12])},
            "HostConfig": body["HostConfig"],
            "NetworkSettings": {"Networks": {}},
        }
        for network, settings in body["NetworkingConfig"]["EndpointsConfig"].items():
            self._join(container, network, BUS, settings)
        self._store(container, "created", {})
        return JSONResponse({"Id": identity, "Warnings": []}, 201)

    async def _connect(self, request: Request) -> Response:
        if (failure := self._fails(request)) is not None:
            return failure
        body, network = await request.json(), request.path_params["id"]
        container = self.containers[body["Container"]]
        self._join(container, f"{PROJECT}_{network}", network, body["EndpointConfig"])
        return Response(status_code=200)

    def _join(
        self, container: dict[str, Any], name: str, network: str, settings: dict[str, Any]
    ) -> None:
        container["NetworkSettings"]["Networks"][name] = deepcopy(settings) | {
            "NetworkID": network,
            "IPAddress": f"172.18.1.{len(self.created_s)}",
        }

    async def _start(self, request: Request) -> Response:
        if (failure := self._fails(request)) is not None:
            return failure
        state = self.containers[request.path_params["id"]]["State"]
        state |= {"Status": "running", "Pid": 2000 + len(self.changes)}
        return Response(status_code=204)

    async def _stop(self, request: Request) -> Response:
        if (failure := self._fails(request)) is not None:
            return failure
        assert request.query_params["t"] == str(STOP_S)
        await self.stops.wait()
        self.containers[request.path_params["id"]]["State"] |= {"Status": "exited", "Pid": 0}
        return Response(status_code=204)

    async def _remove(self, request: Request) -> Response:
        if (failure := self._fails(request)) is not None:
            return failure
        one = self.containers[request.path_params["id"]]
        if one["State"]["Status"] == "running":
            return JSONResponse({"message": "You cannot remove a running container"}, 409)
        assert request.query_params["v"] == "1"
        del self.containers[one["Id"]]
        return Response(status_code=204)
