"""The calls of the Docker Engine API that the proxy makes; it has no others.

See https://docs.docker.com/reference/api/engine/.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import httpx2
import msgspec
from msgspec import Struct

from shared.errors import NotFound, Unavailable

TIMEOUT_S = 30.0
# Docker kills a container that has not stopped within its grace period, and then waits for it.
KILL_S = 30.0
NOT_FOUND = 404
# Further calls wait for a connection. After a call, so many stay open for the next ones.
MAX_CONNECTIONS = 100
MAX_IDLE = 20

T = TypeVar("T")


class _End(Struct):
    """A container's end of a network."""

    ipv4: str | None = msgspec.field(name="IPAddress", default=None)
    ipv6: str | None = msgspec.field(name="GlobalIPv6Address", default=None)


class _Networks(Struct, rename="pascal"):
    networks: dict[str, _End | None] | None = None


class Listed(Struct, rename="pascal"):
    """A container in a list."""

    id: str
    state: str
    created: int
    labels: dict[str, str] = {}
    network_settings: _Networks = msgspec.field(default_factory=_Networks)

    @property
    def networks(self) -> set[str]:
        """Names of its networks."""
        return set(self.network_settings.networks or {})

    @property
    def addresses(self) -> list[str]:
        ends = (self.network_settings.networks or {}).values()
        found = [(end.ipv4, end.ipv6) for end in ends if end is not None]
        return [address for pair in found for address in pair if address]


class _Version(Struct, rename="pascal"):
    api_version: str


class _Created(Struct, rename="pascal"):
    id: str


class _Message(Struct):
    message: str


class Engine:
    """A Docker engine behind a Unix socket.

    Methods raise NotFound for a container that is not there, and Unavailable for everything else.
    """

    def __init__(self, socket: str) -> None:
        self._client = _new_client(socket, MAX_CONNECTIONS)
        # A stop lasts as long as its container drains, and any number of them may drain.
        self._stopping = _new_client(socket, None)
        self._socket = socket
        self._prefix = ""

    async def open(self) -> None:
        """Learn the version of the engine's API."""
        found = await self._get("version", _Version)
        self._prefix = f"/v{found.api_version}"

    async def close(self) -> None:
        await self._client.aclose()
        await self._stopping.aclose()

    async def find(self, labels: Mapping[str, str]) -> list[Listed]:
        """Return all containers with these labels, also those that do not run."""
        wanted = [f"{name}={value}" for name, value in labels.items()]
        filters = msgspec.json.encode({"label": wanted}).decode()
        path, query = f"{self._prefix}/containers/json", {"all": "1", "filters": filters}
        found = await self._get(path, list[Listed], query)
        return [one for one in found if labels.items() <= one.labels.items()]

    async def inspect(self, container: str) -> dict[str, Any]:
        return await self._get(f"{self._prefix}/containers/{container}/json", dict[str, Any])

    async def create(self, name: str, body: Mapping[str, Any]) -> str:
        """Create a container, and return its id."""
        path = f"{self._prefix}/containers/create"
        answer = await self._request("POST", path, query={"name": name}, body=body)
        return _decode(answer, _Created, f"POST {path}").id

    async def connect(self, network: str, container: str, endpoint: Mapping[str, Any]) -> None:
        """Connect a container to a further network."""
        body = {"Container": container, "EndpointConfig": endpoint}
        await self._request("POST", f"{self._prefix}/networks/{network}/connect", body=body)

    async def start(self, container: str) -> None:
        await self._request("POST", f"{self._prefix}/containers/{container}/start")

    async def stop(self, container: str, grace_s: int) -> None:
        """Send SIGTERM, and kill a container that has not ended after `grace_s`."""
        path, query = f"{self._prefix}/containers/{container}/stop", {"t": str(grace_s)}
        timeout_s = grace_s + KILL_S
        await self._request("POST", path, query=query, timeout_s=timeout_s, client=self._stopping)

    async def remove(self, container: str) -> None:
        """Remove a container that does not run, and its anonymous volumes."""
        await self._request("DELETE", f"{self._prefix}/containers/{container}", query={"v": "1"})

    async def _get(self, path: str, kind: type[T], query: Mapping[str, str] | None = None) -> T:
        return _decode(await self._request("GET", path, query=query), kind, f"GET {path}")

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: float = TIMEOUT_S,
        client: httpx2.AsyncClient | None = None,
    ) -> bytes:
        try:
            answer = await (client or self._client).request(
                method, path, params=query, json=body, timeout=timeout_s
            )
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(f"no Docker engine answers at {self._socket}: {reason}") from error
        if answer.is_error:
            kind = NotFound if answer.status_code == NOT_FOUND else Unavailable
            raise kind(
                f"{method} {path}: status {answer.status_code} of the Docker engine:"
                f" {_reason(answer.content)}"
            )
        return answer.content


def _new_client(socket: str, max_connections: int | None) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=max_connections, max_keepalive_connections=MAX_IDLE)
    transport = httpx2.AsyncHTTPTransport(uds=socket, limits=limits)
    return httpx2.AsyncClient(
        transport=transport, base_url="http://docker", timeout=TIMEOUT_S, trust_env=False
    )


def _decode(content: bytes, kind: type[T], about: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"{about}: no answer of a Docker engine: {error}") from error


def _reason(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_Message).message
    except msgspec.MsgspecError:
        return content[:200].decode(errors="replace")
