"""The client of MCP servers, over real sockets."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest

from shared.config.schema import AgentConfig
from shared.net.targets import Target
from shared.protocol.encoding import to_json
from tests.renderer.canary import resolve_as
from workers.agent.mcp_client import MAX_POOLS, McpClient, Server
from workers.agent.mcp_protocol import (
    EventReader,
    McpError,
    McpFault,
    McpRefusal,
    OutcomeUnknown,
    ServerBusy,
    check_listing,
    output_of,
    tools_of,
)
from workers.agent.mcp_session import MAX_PAGES, NUM_TRIES, McpSession

CONFIG = AgentConfig(mcp_networks=["127.0.0.1/32"], call_timeout_s=20.0)
Answer = Callable[[dict[str, Any], dict[str, str]], Awaitable[tuple[Any, ...]]]
"""Returns the status, the result and the lines of further headers, or all bytes that are sent."""


@asynccontextmanager
async def server_of(answer: Answer) -> AsyncIterator[Target]:
    """A server that answers each message with a status and a result, or with bytes alone, and
    then waits until its client has closed the connection."""

    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        mine = ended[-1]
        try:
            # A client may break off in the middle of a request.
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await answer_all(reader, writer)
                writer.close()
                await writer.wait_closed()
        finally:
            mine.set()

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head_of(reader):
            data = await reader.readexactly(int(head["content-length"]))
            if not data:  # The end of a session.
                writer.write(b"HTTP/1.1 204 X\r\n\r\n")
                continue
            request = json.loads(data)
            status, *rest = await answer(request, head)
            if isinstance(status, bytes):
                writer.write(status)
                await reader.read()
                return
            result, *more = rest
            body = to_json({"jsonrpc": "2.0", "id": request.get("id"), "result": result})
            lines = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{''.join(more)}"
            writer.write(f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Target("http", "127.0.0.1", server.sockets[0].getsockname()[1], "/mcp")
    finally:
        server.close()
        for connection in ended:
            await connection.wait()


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

    async def answer(request: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
        methods.append(request["method"])
        return (503 if len(methods) == 1 else 200), {}

    async with server_of(answer) as target:
        client = McpClient(CONFIG)
        async with aclosing(McpSession(client, Server("", "calc", target))) as session:
            with pytest.raises(OutcomeUnknown):
                await session.open(client.deadline())
            await session.open(client.deadline())
        await client.close()
    assert methods == ["server/discover", "server/discover"]


async def test_more_servers_than_pools_do_not_break_off_a_call() -> None:
    others_done = asyncio.Event()

    async def answer(request: dict[str, Any], head: dict[str, str]) -> tuple[int, Any]:
        if request["params"].get("name") == "größe":
            assert head["mcp-name"] == "=?base64?Z3LDtsOfZQ==?="
            await others_done.wait()
        return 200, {"content": []}

    async with server_of(answer) as target:
        client = McpClient(CONFIG)
        async with aclosing(McpSession(client, Server("slow", "calc", target))) as slow:
            await slow.open(client.deadline())
            calling = asyncio.create_task(slow.call("größe", {}, None, no_mark))
            for number in range(MAX_POOLS + 1):
                async with aclosing(
                    McpSession(client, Server(f"{number}", "calc", target))
                ) as session:
                    await session.open(client.deadline())
                    await session.call("fast", {}, None, no_mark)
            others_done.set()
            assert await calling == {"content": []}
        assert len(client._pools) == MAX_POOLS
        await client.close()


@pytest.mark.parametrize("has_room", [True, False])
async def test_an_expired_session_is_opened_again_and_the_call_repeated(
    has_room: bool,
) -> None:
    sessions: list[str] = []
    marks: list[int] = []

    async def answer(request: dict[str, Any], head: dict[str, str]) -> tuple[Any, ...]:
        match request["method"]:
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
        await session.open(client.deadline())
        if has_room:
            assert await session.call("add", {}, None, mark) == {"content": []}
        else:
            with pytest.raises(
                McpRefusal, match="answered 404; another attempt failed: the server answered 404"
            ):
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
        server = Server("", "calc", Target("http", "calc.test", target.port, target.path))
        async with aclosing(McpSession(client, server)) as session:
            assert await session.list_tools() == []
            with pytest.raises(McpFault, match=r"not in agent\.mcp_networks"):
                await session.call("add", {}, None, no_mark)
        await client.close()


async def test_listings_are_cached_for_their_tenant_and_as_long_as_the_server_says() -> None:
    num_listed: Counter[str] = Counter()

    async def answer(request: dict[str, Any], head: dict[str, str]) -> tuple[int, Any]:
        if request["method"] == "tools/list":
            num_listed[head["x-for"]] += 1
        ttl = {"ttlMs": 0} if head["x-for"] == "hurried" else {}
        return 200, {"tools": [{"name": "add", "inputSchema": {}}], **ttl}

    async with server_of(answer) as target:
        client = McpClient(CONFIG)
        for tenant in ("one", "one", "other", "hurried", "hurried"):
            server = Server(tenant, "calc", target, (("X-For", tenant),))
            async with aclosing(McpSession(client, server)) as session:
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
    events = [reader.feed(data[i : i + 1]) for i in range(len(data))]
    assert events[-1] == {"id": 2}
    assert events.count(None) == len(events) - 1


TEXT = {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "Hello"}
BLOB = {"uri": "file:///b.bin", "mimeType": "application/zip", "blob": "A" * 8192}
LINK = {"type": "resource_link", "uri": "s3://c", "name": "c", "description": "a file", "size": 5}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "text", "text": "Hi"}, "Hi"),
        ({"type": "resource", "resource": TEXT}, "file:///a.txt\nHello"),
        ({"type": "resource", "resource": BLOB}, "[file:///b.bin, application/zip, 6 KB]"),
        (LINK, "[s3://c, c, a file, resource_link]"),
        ({"type": "image", "data": "A" * 4096, "mimeType": "image/png"}, "[image/png, 3 KB]"),
        ({"type": "audio", "data": "A" * 4096}, "[audio, 3 KB]"),
        ({"type": "hologram"}, "[hologram]"),
        ({"type": "resource", "resource": 5}, "[resource]"),
    ],
)
def test_each_part_of_a_result_is_a_text_or_what_identifies_it(
    part: dict[str, Any], text: str
) -> None:
    assert output_of({"content": [part, "no part"]}) == text


def test_content_that_is_no_list_is_no_content() -> None:
    assert output_of({"content": 5, "structuredContent": {"a": 1}}) == '{"a":1}'


Script = dict[str, list[tuple[Any, ...]]]
"""Answers by method, in turns; the last one of a method repeats."""
OPENED: tuple[Any, ...] = 200, {"protocolVersion": "2025-06-18"}, "Mcp-Session-Id: s1\r\n"
LISTED: tuple[Any, ...] = 200, {"tools": [{"name": "add", "inputSchema": {}}]}
MADE: tuple[Any, ...] = 200, {"content": []}
LEGACY_SCRIPT: Script = {
    "server/discover": [(400, {})],
    "initialize": [OPENED],
    "notifications/initialized": [(202, {})],
    "tools/list": [LISTED],
    "tools/call": [MADE],
}


def scripted(script: Script, requests: list[tuple[str, str | None]]) -> Answer:
    """Return the answers of a script, which adds each method and its session to `requests`."""

    async def answer(request: dict[str, Any], head: dict[str, str]) -> tuple[Any, ...]:
        method = request["method"]
        answers = script[method]
        number = sum(name == method for name, _ in requests)
        requests.append((method, head.get("mcp-session-id")))
        return tuple(answers[min(number, len(answers) - 1)])

    return answer


@asynccontextmanager
async def session_with(answer: Answer, config: AgentConfig = CONFIG) -> AsyncIterator[McpSession]:
    async with server_of(answer) as target:
        client = McpClient(config)
        try:
            async with aclosing(McpSession(client, Server("", "calc", target))) as session:
                yield session
        finally:
            await client.close()


@pytest.mark.parametrize("status", [400, 404, 405, 200])
async def test_a_session_id_in_a_refused_discovery_is_not_used(status: int) -> None:
    requests: list[tuple[str, str | None]] = []
    refused: tuple[Any, ...] = (status, {}, "Mcp-Session-Id: of-the-refusal\r\n")
    if status == 200:
        refused = (200, None, "Mcp-Session-Id: of-the-refusal\r\n")  # No result.
    script = LEGACY_SCRIPT | {"server/discover": [refused]}
    async with session_with(scripted(script, requests)) as session:
        await session.list_tools()
        await session.call("add", {}, None, no_mark)
    assert requests[:5] == [
        ("server/discover", None),
        ("initialize", None),
        *((method, "s1") for method in ("notifications/initialized", "tools/list", "tools/call")),
    ]


@pytest.mark.parametrize("status", [404, 400])
async def test_a_session_that_ends_after_each_call_is_opened_again(status: int) -> None:
    sessions: list[str] = []
    live: set[str] = set()

    async def answer(request: dict[str, Any], head: dict[str, str]) -> tuple[Any, ...]:
        session = head.get("mcp-session-id", "")
        match request["method"]:
            case "server/discover":
                return 405, {}
            case "initialize":
                sessions.append(f"s{len(sessions)}")
                live.add(sessions[-1])
                return 200, {}, f"Mcp-Session-Id: {sessions[-1]}\r\n"
            case "notifications/initialized":
                return 202, {}
        if session not in live:
            return status, {}, "" if status == 404 else "Id: other\r\n"
        live.remove(session)
        return MADE

    async with session_with(answer) as session:
        for number in range(1, 4):
            assert await session.call("add", {}, None, no_mark) == {"content": []}
            assert len(sessions) == number


STEPS = ["server/discover", "initialize", "notifications/initialized", "tools/list", "tools/call"]


def stuck_at(stage: str, head: bytes, reached: asyncio.Event) -> Answer:
    """Return the answers of a server that answers one method with `head` alone."""
    others = scripted(LEGACY_SCRIPT, [])

    async def answer(request: dict[str, Any], fields: dict[str, str]) -> tuple[Any, ...]:
        if request["method"] != stage:
            return await others(request, fields)
        reached.set()
        return (head,)

    return answer


HEADS = [
    pytest.param(b"", id="silent"),
    pytest.param(b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n", id="no-body"),
    pytest.param(
        b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\n: ping\r\n\r\n", id="sse"
    ),
]


async def use(session: McpSession) -> None:
    await session.list_tools()
    await session.call("add", {}, None, no_mark)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("stage", STEPS)
async def test_a_server_that_hangs_is_one_error_within_the_limit(stage: str, head: bytes) -> None:
    client = McpClient(AgentConfig(mcp_networks=["127.0.0.1/32"], call_timeout_s=0.5))
    async with server_of(stuck_at(stage, head, asyncio.Event())) as target:
        session = McpSession(client, Server("", "calc", target))
        if stage == "server/discover":
            # Older servers may not answer this method, and then they answer the next one.
            assert len(await session.list_tools()) == 1
        else:
            with pytest.raises(McpError, match=r"agent\.call_timeout_s"):
                await use(session)
        await session.aclose()
        await client.close()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("stage", STEPS)
async def test_a_cancelled_request_ends_its_connection_at_once(stage: str, head: bytes) -> None:
    client = McpClient(CONFIG)
    reached = asyncio.Event()
    async with server_of(stuck_at(stage, head, reached)) as target:
        session = McpSession(client, Server("", "calc", target))
        for _ in range(2):  # The second use needs the lock of the opening.
            reached.clear()
            using = asyncio.create_task(use(session))
            await reached.wait()
            using.cancel()
            with pytest.raises(asyncio.CancelledError):
                await using
        await session.aclose()
        await client.close()


async def test_calls_that_wait_for_a_stuck_opening_end_with_it() -> None:
    client = McpClient(AgentConfig(mcp_networks=["127.0.0.1/32"], call_timeout_s=0.5))
    requests: list[tuple[str, str | None]] = []
    script = LEGACY_SCRIPT | {"initialize": [(b"",)]}
    async with server_of(scripted(script, requests)) as target:
        session = McpSession(client, Server("", "calc", target))
        calls = [session.call("add", {}, None, no_mark) for _ in range(8)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, McpError) for error in ended)
        await session.aclose()
        await client.close()
    # The limit is not one for each in turn.
    assert [name for name, _ in requests].count("initialize") < len(calls)


BUSY: tuple[Any, ...] = (429, {}, "Retry-After: 0\r\n")
AWAY: tuple[Any, ...] = (503, {}, "Retry-After: 0\r\n")


@pytest.mark.parametrize("busy", [BUSY, AWAY])
@pytest.mark.parametrize("method", ["server/discover", "initialize", "tools/list", "tools/call"])
async def test_a_busy_server_gets_the_request_again(method: str, busy: tuple[Any, ...]) -> None:
    requests: list[tuple[str, str | None]] = []
    marks: list[int] = []

    async def mark() -> None:
        marks.append(len(requests))

    script = LEGACY_SCRIPT | {method: [busy, busy, LEGACY_SCRIPT[method][0]]}
    async with session_with(scripted(script, requests)) as session:
        await session.list_tools()
        assert await session.call("add", {}, None, mark) == {"content": []}
    assert [name for name, _ in requests].count(method) == NUM_TRIES
    assert len(marks) == 1


async def test_a_server_that_stays_busy_refuses_the_call() -> None:
    requests: list[tuple[str, str | None]] = []
    script = LEGACY_SCRIPT | {"tools/call": [BUSY]}
    async with session_with(scripted(script, requests)) as session:
        with pytest.raises(ServerBusy, match="429") as refused:
            await session.call("add", {}, None, no_mark)
    assert refused.value.retryable
    assert refused.value.error["code"] == 429


async def test_a_failure_without_a_known_outcome_is_repeated_for_listings_alone() -> None:
    requests: list[tuple[str, str | None]] = []
    script = LEGACY_SCRIPT | {"tools/list": [(502, {}), LISTED], "tools/call": [(502, {}), MADE]}
    async with session_with(scripted(script, requests)) as session:
        assert len(await session.list_tools()) == 1
        with pytest.raises(OutcomeUnknown, match="502"):
            await session.call("add", {}, None, no_mark)
    names = [name for name, _ in requests]
    assert (names.count("tools/list"), names.count("tools/call")) == (2, 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}), "401: the header Authorization is missing or wrong"),
        ((307, {}, "Location: /mcp/\r\n"), "307: redirects are not followed"),
        ((500, {}), "answered 500"),
    ],
)
async def test_a_refusal_to_open_says_what_to_do(answer: tuple[Any, ...], message: str) -> None:
    script = LEGACY_SCRIPT | {"server/discover": [answer], "initialize": [answer]}
    async with session_with(scripted(script, [])) as session:
        with pytest.raises(McpError, match=message):
            await session.list_tools()


async def test_a_listing_without_an_end_is_one_error() -> None:
    requests: list[tuple[str, str | None]] = []
    page = (200, {"tools": [], "nextCursor": "more"})
    async with session_with(scripted(LEGACY_SCRIPT | {"tools/list": [page]}, requests)) as session:
        with pytest.raises(McpFault, match=f"more than {MAX_PAGES} pages"):
            await session.list_tools()
    assert [name for name, _ in requests].count("tools/list") == MAX_PAGES
