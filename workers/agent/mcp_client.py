"""HTTP client of MCP servers, with limits on bytes, time and connections."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

import httpcore2

from shared.config.schema import AgentConfig
from shared.helpers.lru import ByteLRU
from shared.net.dialing import AddressBlocked, GuardedBackend, Resolver, url_of
from shared.net.targets import Target
from shared.protocol.items import ListedTool
from workers.agent import mcp_protocol as mcp
from workers.agent.mcp_protocol import EventReader, McpFault, NotSent, OutcomeUnknown

MAX_CONNECTIONS = 8
MAX_POOLS = 64
MAX_ERAS = 1024
KEEP_ALIVE_S = 60.0
ERA_FRESH_S = 300.0
MAX_LISTINGS_BYTES = 16 * 2**20

Mark = Callable[[], Awaitable[None]]
"""Callback that is awaited when the connection is open, before the first byte is sent."""


@dataclass(frozen=True, slots=True)
class Server:
    """An MCP server as one tenant sees it."""

    tenant: str
    label: str
    target: Target
    headers: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Server({self.label}, {self.target.host})"  # Headers are secret.


@dataclass(frozen=True, slots=True)
class Listing:
    """Cached tools of a server."""

    tools: list[ListedTool]
    until_s: float
    """Time of the event loop at which the listing expires."""


class McpClient:
    """Requests to all servers of one agent. Connections are never shared between tenants."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._networks = [ip_network(text) for text in config.mcp_networks]
        self._resolver = Resolver()
        self._tls = httpcore2.default_ssl_context()
        self._pools: OrderedDict[Server, httpcore2.AsyncConnectionPool] = OrderedDict()
        # Each entry counts as one byte.
        self._eras = ByteLRU[Target, tuple[str, float]](MAX_ERAS)
        self.listings = ByteLRU[Server, Listing](MAX_LISTINGS_BYTES)
        """Cached tools of each server, for each tenant and each set of headers."""
        self._number = 0

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()
        await self._resolver.close()

    def pool_of(self, server: Server) -> httpcore2.AsyncConnectionPool:
        pool = self._pools.pop(server, None)
        if pool is None:
            pool = httpcore2.AsyncConnectionPool(
                ssl_context=self._tls,
                max_connections=MAX_CONNECTIONS,
                keepalive_expiry=KEEP_ALIVE_S,
                # Without TLS, requests and tokens stay within our own networks.
                network_backend=GuardedBackend(
                    self._resolver, self._networks, only_allowed=server.target.scheme == "http"
                ),
            )
        self._pools[server] = pool
        return pool

    async def trim(self) -> None:
        """Close idle pools over the limit, least recently used first."""
        for server, pool in list(self._pools.items()):
            if len(self._pools) <= MAX_POOLS:
                return
            # Closing a pool would break off the calls of other responses.
            if all(c.is_idle() or c.is_closed() for c in pool.connections):
                self._pools.pop(server, None)
                await pool.aclose()

    def era_of(self, target: Target) -> str | None:
        version, noted_s = self._eras.get(target) or (None, 0.0)
        is_fresh = asyncio.get_running_loop().time() - noted_s < ERA_FRESH_S
        return version if is_fresh else None

    def note_era(self, target: Target, version: str) -> None:
        self._eras.put(target, (version, asyncio.get_running_loop().time()), 1)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def deadline(self) -> float:
        """Return the time of the event loop by which a call or a listing must end."""
        return asyncio.get_running_loop().time() + self._config.call_timeout_s

    async def post(
        self,
        server: Server,
        headers: list[tuple[str, str]],
        body: bytes,
        number: int | None,
        until_s: float,
        mark: Mark | None = None,
        *,
        method: str = "POST",
    ) -> tuple[int, Mapping[str, str], Any]:
        """Return the status, the headers and the message of an answer.

        `until_s` is the time of the event loop by which the whole answer must have arrived. Raises
        NotSent, OutcomeUnknown or McpFault.
        """
        started = False

        async def trace(event: str, _: Any) -> None:
            nonlocal started
            if event.endswith("send_request_headers.started") and not started:
                started = True
                if mark is not None:
                    await mark()

        request_headers = [("Host", server.target.host_header), *headers, *server.headers]
        request_headers.append(("Content-Length", str(len(body))))
        try:
            async with (
                asyncio.timeout_at(until_s),
                self.pool_of(server).stream(
                    method,
                    url_of(server.target),
                    headers=request_headers,
                    content=body,
                    extensions={"trace": trace},
                ) as response,
            ):
                response_headers = _headers_of(response)
                message = await self._read(response, response_headers, number)
                return response.status, response_headers, message
        except AddressBlocked:
            raise McpFault(
                "the server's address is private, or is used without TLS, and is not in"
                " agent.mcp_networks"
            ) from None
        except (
            OSError,
            ValueError,
            TimeoutError,
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
            httpcore2.TimeoutException,
        ) as error:
            late, kind = isinstance(error, TimeoutError), type(error).__name__
            reason = "no answer in time, see agent.call_timeout_s" if late else kind
            if started:
                raise OutcomeUnknown(f"the connection broke ({reason})") from None
            raise NotSent(f"the server cannot be reached ({reason})") from None

    async def _read(
        self, response: httpcore2.Response, headers: Mapping[str, str], number: int | None
    ) -> Any:
        """Return the message of an answer; None for an answer without one."""
        limit = self._config.max_answer_mib * 2**20
        is_stream = headers.get("content-type", "").startswith("text/event-stream")
        events = EventReader(number) if is_stream and number is not None else None
        body, size = bytearray(), 0
        async for chunk in response.aiter_stream():
            size += len(chunk)
            if size > limit:
                raise McpFault(
                    f"the server's answer has more than {self._config.max_answer_mib} MiB"
                    " (agent.max_answer_mib)"
                )
            if events is None:
                body += chunk
            elif (message := events.feed(chunk)) is not None:
                return message
        if events is not None:
            raise OutcomeUnknown("the server's stream ended without an answer")
        is_json = headers.get("content-type", "").startswith("application/json")
        return mcp.decode_json(bytes(body)) if body and is_json else None


def _headers_of(response: httpcore2.Response) -> dict[str, str]:
    return {name.decode().lower(): text.decode() for name, text in response.headers}
