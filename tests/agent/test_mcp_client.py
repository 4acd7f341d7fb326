"""The client of MCP servers, over real sockets."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.config_agent import AgentConfig
from shared.protocol.encoding import to_json
from shared.targets import Target
from tests.renderer.canary import resolve_as
from workers.agent.mcp_client import MAX_POOLS, McpClient, NotSent, OutcomeUnknown, Server
from workers.agent.mcp_protocol import (
    EventReader,
    McpFault,
    McpRefusal,
    check_listing,
    output_of,
    tools_of,
)
from workers.agent.mcp_session import McpSession, open_session

CONFIG = AgentConfig(mcp_networks=["127.0.0.1/32"], call_timeout_s=20.0)
Answer = Callable[[dict[str, Any], dict[str, str]], Awaitable[tuple[Any, ...]]]
"""Returns the status, the result and the lines of further headers."""


@asynccontextmanager
async def server_of(answer: Answer) -> AsyncIterator[Target]:
    """A server that answers each message with a status and a result."""

    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        mine = ended[-1]
        while head := await _head_of(reader):
            sent = json.loads(await reader.readexactly(int(head["content-length"])))
            status, result, *more = await answer(sent, head)
            body = to_json({"jsonrpc": "2.0", "id": sent.get("id"), "result": result})
            lines = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{''.join(more)}"
            writer.write(f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()
        await writer.wait_closed()
        mine.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Target("http", "127.0.0.1", server.sockets[0].getsockname()[1], "/mcp")
    finally:
        server.close()
        for one in ended:
            await one.wait()


async def _head_of(reader: asyncio.StreamReader) -> dict[str, str]:
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return {}
    lines = text.strip().split("\r\n")[1:]
    return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}


async def no_mark() -> None:
    """Nothing is written before a call."""


async def test_a_server_that_failed_at_first_is_asked_again_which_version_it_has() -> None:
    methods: list[str] = []

    async def answer(sent: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
        methods.append(sent["method"])
        return (503 if len(methods) == 1 else 200), {}

    async with server_of(answer) as target:
        client = McpClient(CONFIG)
        async with open_session(client, Server("", "calc", target)) as session:
            with pytest.raises(OutcomeUnknown):
                await session.open()
            await session.open()
        await client.close()
    assert methods == ["server/discover", "server/discover"]


async def test_more_servers_than_pools_do_not_break_off_a_call() -> None:
    others_done = asyncio.Event()

    async def answer(sent: dict[str, Any], head: dict[str, str]) -> tuple[int, Any]:
        if sent["params"].get("name") == "größe":
            assert head["mcp-name"] == "=?base64?Z3LDtsOfZQ==?="
            await others_done.wait()
        return 200, {"content": []}

    async with server_of(answer) as target:
        client = McpClient(CONFIG)
        async with open_session(client, Server("slow", "calc", target)) as slow:
            await slow.open()
            calling = asyncio.create_task(slow.call("größe", {}, None, no_mark))
            for number in range(MAX_POOLS + 1):
                async with open_session(client, Server(f"{number}", "calc", target)) as session:
                    await session.open()
                    await session.call("fast", {}, None, no_mark)
            others_done.set()
            assert await calling == {"content": []}
        assert len(client._pools) == MAX_POOLS
        await client.close()


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_session_that_has_expired_is_opened_anew_and_the_call_sent_again(
    has_room: bool,
) -> None:
    sessions: list[str] = []
    marks: list[int] = []

    async def answer(sent: dict[str, Any], head: dict[str, str]) -> tuple[Any, ...]:
        match sent["method"]:
            case "server/discover":
                return 405, {}
            case "initialize" if has_room or not sessions:
                sessions.append(f"s{len(sessions)}")
                return 200, {"protocolVersion": "2025-06-18"}, f"Mcp-Session-Id: {sessions[-1]}\r\n"
            case "tools/call" if head["mcp-session-id"] == "s1":
                return 200, {"content": []}
            case "notifications/initialized":
                return 202, {}
        return 404, {}

    async def mark() -> None:
        marks.append(len(sessions))

    async with server_of(answer) as target:
        client = McpClient(CONFIG)
        session = McpSession(client, Server("", "calc", target))
        await session.open()
        if has_room:
            assert await session.call("add", {}, None, mark) == {"content": []}
        else:
            with pytest.raises(McpRefusal, match="could not be opened anew"):
                await session.call("add", {}, None, mark)
        await client.close()
    assert marks == [1]


async def test_a_name_that_changes_its_address_between_listing_and_call_is_not_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve_as(monkeypatch, ["127.0.0.1"], ["127.0.0.1"], ["127.0.0.2"])

    async def answer(_: dict[str, Any], __: dict[str, str]) -> tuple[int, Any, str]:
        return 200, {"tools": []}, "Connection: close\r\n"

    async with server_of(answer) as target:
        client = McpClient(CONFIG)
        server = Server("", "calc", target._replace(host="calc.test"))
        async with open_session(client, server) as session:
            assert await session.list_tools() == []
            with pytest.raises(NotSent, match=r"not in agent\.mcp_networks"):
                await session.call("add", {}, None, no_mark)
        await client.close()


async def test_listings_are_cached_for_their_tenant_and_as_long_as_the_server_says() -> None:
    num_listed: Counter[str] = Counter()

    async def answer(sent: dict[str, Any], head: dict[str, str]) -> tuple[int, Any]:
        if sent["method"] == "tools/list":
            num_listed[head["x-for"]] += 1
        ttl = {"ttlMs": 0} if head["x-for"] == "hurried" else {}
        return 200, {"tools": [{"name": "add", "inputSchema": {}}], **ttl}

    async with server_of(answer) as target:
        client = McpClient(CONFIG)
        for tenant in ("one", "one", "other", "hurried", "hurried"):
            server = Server(tenant, "calc", target, (("X-For", tenant),))
            async with open_session(client, server) as session:
                assert [tool.name for tool in await session.list_tools()] == ["add"]
        await client.close()
    assert num_listed == {"one": 1, "other": 1, "hurried": 2}


def test_a_listing_must_fit_into_a_step() -> None:
    schema = {"type": "object", "description": "x" * 10_000}
    tools = tools_of({"tools": [{"name": f"t{i}", "inputSchema": schema} for i in range(30)]})
    check_listing(tools[:20])
    with pytest.raises(McpFault, match="262144 bytes"):
        check_listing(tools)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_found_however_their_bytes_arrive(end: str) -> None:
    lines = [": ping", "", 'data: {"id": 1}', "", "event: message", 'data: {"id":', "data: 2}", ""]
    data = "".join(line + end for line in lines).encode()
    reader = EventReader(2)
    found = [reader.feed(data[i : i + 1]) for i in range(len(data))]
    assert found[-1] == {"id": 2}
    assert found.count(None) == len(found) - 1


def test_content_that_is_no_list_is_no_content() -> None:
    assert output_of({"content": 5, "structuredContent": {"a": 1}}) == '{"a":1}'
