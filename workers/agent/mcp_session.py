"""The requests of one response to one MCP server, in either era of the protocol."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from shared.protocol.encoding import to_json
from shared.protocol.items import ListedTool
from workers.agent import mcp_protocol as mcp
from workers.agent.mcp_client import Listing, Mark, McpClient, NotSent, OutcomeUnknown, Server
from workers.agent.mcp_protocol import LEGACY, MODERN, McpFault, McpRefusal

MAX_LISTING_S = 60.0
MAX_PAGES = 16
# The end of a response does not wait longer for a server to end its session.
CLOSE_S = 2.0


@asynccontextmanager
async def open_session(client: McpClient, server: Server) -> AsyncIterator["McpSession"]:
    session = McpSession(client, server)
    try:
        yield session
    finally:
        await session.close()


class McpSession:
    """The requests of one response to one server."""

    def __init__(self, client: McpClient, server: Server) -> None:
        self._client = client
        self._server = server
        self._version: str | None = None
        self._session_id: str | None = None
        self._is_open = False
        self._opening = asyncio.Lock()
        """Held while a session is opened; several calls may want one at the same time."""

    async def list_tools(self) -> list[ListedTool]:
        """Return the tools, which are cached for a while.

        Raises NotSent, OutcomeUnknown, McpRefusal or McpFault.
        """
        cached = self._client.listings.get(self._server)
        now_s = asyncio.get_running_loop().time()
        if cached is not None and now_s < cached.until_s:
            return cached.tools
        tools, fresh_s = await self._read_tools()
        if fresh_s > 0:
            known = Listing(tools, now_s + fresh_s)
            self._client.listings.put(self._server, known, len(to_json(tools)))
        return tools

    async def _read_tools(self) -> tuple[list[ListedTool], float]:
        """Return the tools, and for how many seconds the server lets them be cached."""
        await self.open()
        tools: list[ListedTool] = []
        fresh_s = MAX_LISTING_S
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            params = {} if cursor is None else {"cursor": cursor}
            result = await self._request("tools/list", params)
            tools += mcp.tools_of(result)
            mcp.check_listing(tools)
            fresh_s = min(fresh_s, mcp.fresh_s_of(result))
            following = result.get("nextCursor")
            if not isinstance(following, str) or not following:
                return tools, fresh_s
            cursor = following
        raise McpFault(f"the server's listing has more than {MAX_PAGES} pages")

    async def call(
        self, name: str, arguments: Mapping[str, Any], key: str | None, mark: Mark
    ) -> dict[str, Any]:
        """Call a tool. `mark` is awaited before the first byte of the call leaves.

        Raises what `list_tools` raises, and what `mark` raises.
        """
        meta = {} if key is None else {"pagemill/idempotencyKey": key}
        headers = [] if key is None else [("Idempotency-Key", key)]
        params = {"name": name, "arguments": arguments}
        return await self._request("tools/call", params, name, mark, meta, headers)

    async def open(self) -> None:
        """Find out which era the server belongs to, and open a session if it needs one."""
        async with self._opening:
            if self._is_open:
                return
            if not await self._open_modern():
                await self._open_legacy()
            self._is_open = True

    async def _open_modern(self) -> bool:
        """Return whether the server belongs to the modern era, which has no sessions."""
        known = self._client.era_of(self._server.target)
        if known == LEGACY:
            return False
        self._version = MODERN
        if known is None:
            try:
                await self._request("server/discover", {})
            except (McpRefusal, McpFault):
                return False  # An older server does not know the method.
            self._client.note_era(self._server.target, MODERN)
        return True

    async def _open_legacy(self) -> None:
        self._version = LEGACY
        result = await self._request("initialize", mcp.initialize_params())
        version = result.get("protocolVersion")
        if isinstance(version, str) and version.isascii() and version.isprintable():
            self._version = version
        await self._notify("notifications/initialized")
        self._client.note_era(self._server.target, LEGACY)

    async def _request(
        self,
        method: str,
        params: Mapping[str, Any],
        name: str | None = None,
        mark: Mark | None = None,
        meta: Mapping[str, Any] | None = None,
        headers: list[tuple[str, str]] | None = None,
        *,
        is_again: bool = False,
    ) -> dict[str, Any]:
        assert self._version is not None
        number = self._client.next_number()
        body = mcp.request_body(self._version, number, method, params, meta or {})
        sent = mcp.request_headers(self._version, method, name, self._session_id)
        status, shown, message = await self._client.post(
            self._server, [*sent, *(headers or [])], body, number, mark
        )
        if status == 404 and "Mcp-Session-Id" in dict(sent) and not is_again:
            expired = dict(sent)["Mcp-Session-Id"]
            return await self._repeat_in_new_session(expired, method, params, name, meta, headers)
        session = shown.get("mcp-session-id")
        if session is not None and session.isascii() and session.isprintable():
            self._session_id = session
        if isinstance(message, dict) and "error" in message:
            return mcp.result_of(message, number)
        if status >= 500:
            raise OutcomeUnknown(f"the server answered with status {status}")
        if status != 200:
            raise McpRefusal(
                {"type": "http_error", "code": status, "message": f"the server answered {status}"}
            )
        return mcp.result_of(message, number)

    async def _open_instead_of(self, expired: str) -> None:
        """Open a session, unless another call has done so since this one's has expired."""
        async with self._opening:
            if self._session_id == expired:
                self._session_id, self._is_open = None, False
        await self.open()

    async def _repeat_in_new_session(
        self,
        expired: str,
        method: str,
        params: Mapping[str, Any],
        name: str | None,
        meta: Mapping[str, Any] | None,
        headers: list[tuple[str, str]] | None,
    ) -> dict[str, Any]:
        """Repeat a request that was refused because its session has expired, without another mark.

        Raises McpRefusal if it does not reach the server a second time.
        """
        is_open = False
        try:
            await self._open_instead_of(expired)
            is_open = True
            return await self._request(method, params, name, None, meta, headers, is_again=True)
        except (NotSent, OutcomeUnknown, McpRefusal, McpFault) as error:
            if is_open and not isinstance(error, NotSent):
                raise
            message = f"the session had expired, and could not be opened anew: {error}"
            raise McpRefusal({"type": "http_error", "code": 404, "message": message}) from error

    async def _notify(self, method: str) -> None:
        assert self._version is not None
        body = to_json({"jsonrpc": "2.0", "method": method})
        sent = mcp.request_headers(self._version, method, None, self._session_id)
        await self._client.post(self._server, sent, body, None, None)

    async def close(self) -> None:
        """End the session at the server, if it has one."""
        if self._session_id is not None and self._version is not None:
            sent = mcp.request_headers(self._version, "", None, self._session_id)
            with contextlib.suppress(NotSent, OutcomeUnknown, McpFault, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._client.post(self._server, sent, b"", None, None, method="DELETE")
        await self._client.trim()
