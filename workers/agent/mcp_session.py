"""The requests of one response to one MCP server, in either era of the protocol."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.protocol.encoding import to_json
from shared.protocol.items import ListedTool
from workers.agent import mcp_protocol as mcp
from workers.agent.mcp_client import Listing, Mark, McpClient, Server
from workers.agent.mcp_protocol import (
    LEGACY,
    MODERN,
    McpError,
    McpFault,
    McpRefusal,
    NotSent,
    OutcomeUnknown,
    ServerBusy,
    SessionLost,
)

MAX_LISTING_S = 60.0
MAX_PAGES = 16
NUM_TRIES = 3
"""Attempts at one request, as long as it is certain that none was carried out."""
RETRY_S = 0.25
"""Pause before the second attempt, and half of the pause before the third."""
# Servers of older SDKs may never answer a method that they do not know.
DISCOVERY_S = 5.0
# Limit on the wait for a server to end its session when the response has ended.
CLOSE_S = 2.0
# A proxy answers with these for a server of any era.
PROXY_STATUSES = (502, 503, 504)


@dataclass(frozen=True, slots=True)
class Request:
    """A request, which may be sent several times."""

    method: str
    params: Mapping[str, Any]
    until_s: float
    """Time of the event loop by which the answer must have arrived."""
    name: str | None = None
    """Name of the tool that is called."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    headers: Sequence[tuple[str, str]] = ()
    only_reads: bool = False
    """The request may be repeated although its outcome is unknown."""


class McpSession:
    """The requests of one response to one server."""

    def __init__(self, client: McpClient, server: Server) -> None:
        self._client = client
        self._server = server
        self._version: str | None = None
        self._session_id: str | None = None
        self._is_open = False
        self._opening = asyncio.Lock()
        """Held while a session is opened, because several calls may need one at the same time.
        Requests in a session do not take the lock; if the session is lost, it is opened again."""

    async def list_tools(self) -> list[ListedTool]:
        """Return the tools, from the cache if they are fresh. Raises an McpError."""
        cached = self._client.listings.get(self._server)
        now_s = asyncio.get_running_loop().time()
        if cached is not None and now_s < cached.until_s:
            return cached.tools
        tools, fresh_s = await self._read_tools()
        if fresh_s > 0:
            listing = Listing(tools, now_s + fresh_s)
            self._client.listings.put(self._server, listing, len(to_json(tools)))
        return tools

    async def _read_tools(self) -> tuple[list[ListedTool], float]:
        """Return the tools, and the number of seconds for which they may be cached."""
        until_s = self._client.deadline()
        tools: list[ListedTool] = []
        fresh_s = MAX_LISTING_S
        params: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            result = await self._request(Request("tools/list", params, until_s, only_reads=True))
            tools += mcp.tools_of(result)
            mcp.check_listing(tools)
            fresh_s = min(fresh_s, mcp.fresh_s_of(result))
            following = result.get("nextCursor")
            if not isinstance(following, str) or not following:
                return tools, fresh_s
            params = {"cursor": following}
        raise McpFault(f"the server's listing has more than {MAX_PAGES} pages")

    async def call(
        self, name: str, arguments: Mapping[str, Any], key: str | None, mark: Mark
    ) -> dict[str, Any]:
        """Call a tool. `mark` is awaited once, before the first byte of the call is sent.

        Raises an McpError, and what `mark` raises.
        """
        request = Request(
            "tools/call",
            {"name": name, "arguments": arguments},
            self._client.deadline(),
            name,
            {} if key is None else {"pagemill/idempotencyKey": key},
            [] if key is None else [("Idempotency-Key", key)],
        )
        return await self._request(request, mark)

    # -- requests in a session ---------------------------------------------------------------------

    async def _request(self, request: Request, mark: Mark | None = None) -> dict[str, Any]:
        """Send a request, in a session if the server needs one, and return its result.

        After a temporary failure it is sent again, if it was certainly not carried out. Attempts
        after a refusal are not marked, so the refusal stays the outcome if none of them reaches the
        server.
        """
        refusal: McpRefusal | None = None
        for number in range(NUM_TRIES):
            is_open = False
            try:
                await self.open(request.until_s)
                is_open = True
                return (await self._send(request, mark if refusal is None else None))[0]
            except McpError as error:
                failure, was_sent = error, is_open and not isinstance(error, NotSent)
            may_repeat = not was_sent or request.only_reads or isinstance(failure, McpRefusal)
            if was_sent and isinstance(failure, McpRefusal):
                refusal = failure
            pause_s = RETRY_S * 2**number if failure.pause_s is None else failure.pause_s
            is_last = number == NUM_TRIES - 1 or not (failure.retryable and may_repeat)
            if is_last or not await _pause(pause_s, request.until_s):
                break
        if refusal is not None and not was_sent:
            message = f"{refusal}; another attempt failed: {failure}"
            raise McpRefusal(refusal.error | {"message": message}) from failure
        raise failure

    async def _send(
        self, request: Request, mark: Mark | None = None
    ) -> tuple[dict[str, Any], str | None]:
        """Send a request once, and return its result and the id of the session that it began."""
        assert self._version is not None
        session_id, number = self._session_id, self._client.next_number()
        body = mcp.request_body(self._version, number, request.method, request.params, request.meta)
        headers = mcp.request_headers(self._version, request.method, request.name, session_id)
        status, response_headers, message = await self._client.post(
            self._server, [*headers, *request.headers], body, number, request.until_s, mark
        )
        try:
            has_session = session_id is not None
            result = mcp.answer_of(
                status, response_headers, message, number, has_session=has_session
            )
        except SessionLost:
            # Another call may have opened a session since.
            if self._session_id == session_id:
                self._session_id, self._is_open = None, False
            raise
        new_id = response_headers.get("mcp-session-id", "")
        return result, new_id if new_id and new_id.isascii() and new_id.isprintable() else None

    # -- opening -----------------------------------------------------------------------------------

    async def open(self, until_s: float) -> None:
        """Find out which era the server belongs to, and open a session if it needs one.

        Returns at once if the server is open already. Raises an McpError.
        """
        try:
            async with asyncio.timeout_at(until_s):
                await self._opening.acquire()
        except TimeoutError:
            raise NotSent("no session was opened in time, see agent.call_timeout_s") from None
        try:
            if not self._is_open:
                # Requests that open a session have no session id, so they cannot raise SessionLost.
                self._session_id = None
                if not await self._open_modern(until_s):
                    await self._open_legacy(until_s)
                self._is_open = True
        finally:
            self._opening.release()

    async def _open_modern(self, until_s: float) -> bool:
        """Return whether the server belongs to the modern era, which has no sessions."""
        era = self._client.era_of(self._server.target)
        if era == LEGACY:
            return False
        self._version = MODERN
        if era is None:
            now_s = asyncio.get_running_loop().time()
            limit_s = now_s + min(DISCOVERY_S, (until_s - now_s) / 2)
            try:
                await self._send(Request("server/discover", {}, limit_s))
            except (ServerBusy, NotSent):
                raise
            except McpError as error:
                # An older server does not know the method.
                if isinstance(error, OutcomeUnknown) and error.status in PROXY_STATUSES:
                    raise
                return False
            self._client.note_era(self._server.target, MODERN)
        return True

    async def _open_legacy(self, until_s: float) -> None:
        self._version = LEGACY
        request = Request("initialize", mcp.initialize_params(), until_s)
        # A refusal may have a session id as well, but the server does not keep that session.
        result, self._session_id = await self._send(request)
        version = result.get("protocolVersion")
        if isinstance(version, str) and version.isascii() and version.isprintable():
            self._version = version
        body = to_json({"jsonrpc": "2.0", "method": "notifications/initialized"})
        headers = mcp.request_headers(self._version, "", None, self._session_id)
        await self._client.post(self._server, headers, body, None, until_s)
        self._client.note_era(self._server.target, LEGACY)

    async def aclose(self) -> None:
        """End the session at the server, if it has one."""
        if self._session_id is not None and self._version is not None:
            headers = mcp.request_headers(self._version, "", None, self._session_id)
            until_s = asyncio.get_running_loop().time() + CLOSE_S
            with contextlib.suppress(McpError):
                await self._client.post(self._server, headers, b"", None, until_s, method="DELETE")
        await self._client.trim()


async def _pause(pause_s: float, until_s: float) -> bool:
    """Wait before another attempt. Return False at once if there is no time left for it."""
    if asyncio.get_running_loop().time() + pause_s >= until_s:
        return False
    await asyncio.sleep(pause_s)
    return True
