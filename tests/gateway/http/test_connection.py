"""Limits on connections: their number, and the time that they may be silent."""

import asyncio
import contextlib
import json
import re
import resource
import socket
import ssl
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import TypeVarTuple

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from shared.config.schema import GatewayConfig
from shared.telemetry.metrics import Counter
from tests.gateway.conftest import Gateway, Start
from tests.gateway.http.test_middleware import certificate, check_error
from tests.gateway.routes.test_chat import question
from workers.gateway.http.connection import (
    MAX_LINGERING,
    PROBE,
    ConnectionLimits,
    LimitedHttpProtocol,
)
from workers.gateway.http.places import ConnectionPlaces, Place
from workers.gateway.worker import OTHER_FILES

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
REFUSED = "pagemill_http_connections_refused_total"
SLOW = "pagemill_http_slow_clients_total"
IN_FLIGHT = "pagemill_http_requests_in_flight"
CHAT_LABELS = 'endpoint="/v1/chat/completions",model="",role="gateway"'
UNANSWERED = f'pagemill_http_requests_total{{{CHAT_LABELS},status="none"'


async def connect(gateway: Gateway, trust: ssl.SSLContext | None = None) -> Connection:
    host, port = gateway.url.partition("://")[2].split(":")
    return await asyncio.open_connection(host, int(port), ssl=trust)


async def get(connection: Connection, request: bytes = HEALTH) -> tuple[bytes, bytes]:
    """Send a request and return the head and body of the response."""
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    ]
    return head, await reader.readexactly(length)


async def leave(*connections: Connection) -> None:
    for _, writer in connections:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def post(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


def num_files(gateway: Gateway) -> int:
    return len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir()))


def with_key(key: str, request: bytes) -> bytes:
    """Return the request with the Authorization of a key; `KEYS` of the caller has its digest."""
    head, end, body = request.partition(b"\r\n\r\n")
    return head + b"\r\nAuthorization: Bearer key-" + key.encode() + end + body


async def metric(connection: Connection, name: str, key: str = "") -> float:
    request = HEALTH.replace(b"/health", b"/metrics")
    _, response = await get(connection, with_key(key, request) if key else request)
    lines = [line for line in response.decode().splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


UPLOAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 1000"
    b"\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n"
)


async def begin_uploads(
    gateway: Gateway, number: int, key: str = "", trust: ssl.SSLContext | None = None
) -> list[tuple[bytes, Connection]]:
    """Begin uploads that do not end, so that these requests stay in progress.

    Return the heads of the responses, which are `100 Continue` unless a request was refused.
    """
    begun = []
    for _ in range(number):
        reader, writer = await connect(gateway, trust)
        writer.write(with_key(key, UPLOAD) if key else UPLOAD)
        begun.append((await reader.readuntil(b"\r\n\r\n"), (reader, writer)))
    return begun


async def answer_to(gateway: Gateway, request: bytes) -> bytes:
    """Return all bytes that a client gets which sends nothing after its request."""
    reader, writer = await connect(gateway)
    writer.write(request)
    if b"HTTP/1.0" not in request:
        writer.write_eof()
    answer = await reader.read()
    await leave((reader, writer))
    return answer


async def test_a_client_that_stops_sending_gets_its_answer(gateway: Gateway) -> None:
    for stream in (False, True):
        body = question() | {"max_tokens": 4, "stream": stream}
        answer = await answer_to(gateway, post("/v1/chat/completions", body))
        # The number of interim responses depends on the time until the answer.
        head, _, rest = answer.replace(PROBE, b"").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert rest.endswith(b"0\r\n\r\n" if stream else b"}")


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_a_client_that_closes_while_it_waits_ends_its_request(
    gateway: Gateway, version: bytes
) -> None:
    body = question() | {"max_tokens": 900, "ignore_eos": True}
    connection, start = await connect(gateway), gateway.log.stat().st_size
    request = post("/v1/chat/completions", body)
    connection[1].write(request.replace(b"HTTP/1.1", version))
    probe = await connect(gateway)
    num_unanswered = await metric(probe, UNANSWERED)
    while await metric(probe, IN_FLIGHT) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await leave(connection)
    while await metric(probe, IN_FLIGHT) > 1:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await metric(probe, UNANSWERED) == num_unanswered + 1
    lines = map(json.loads, gateway.log.read_bytes()[start:].splitlines())
    (line,) = [each for each in lines if each.get("path") == "/v1/chat/completions"]
    assert (line["status"], line["request_id"][:9]) == (499, "chatcmpl-")
    await leave(probe)


async def test_a_stream_to_an_old_client_ends_by_closing(gateway: Gateway) -> None:
    body = question() | {"max_tokens": 4, "stream": True}
    request = post("/v1/chat/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, events = (await answer_to(gateway, request)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"identity"])
async def test_an_unknown_transfer_coding_is_a_501(gateway: Gateway, coding: bytes) -> None:
    head = post("/v1/completions", {}).partition(b"Content-Length")[0]
    answer = await answer_to(gateway, head + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 501")
    check_error(answer.partition(b"\r\n\r\n")[2], "unknown_transfer_coding")


async def test_a_request_without_a_host_is_refused(gateway: Gateway) -> None:
    without = HEALTH.replace(b"Host: localhost\r\n", b"Connection: close\r\n")
    answer = await answer_to(gateway, without)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"the header Host is missing" in answer
    old = await answer_to(gateway, without.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert old.startswith(b"HTTP/1.1 200")


async def test_connections_have_a_limit(another: Start) -> None:
    gateway = another(max_connections=4)
    begun = await begin_uploads(gateway, 4)
    held = [connection for head, connection in begun if head.startswith(b"HTTP/1.1 100")]
    assert len(held) == 4

    # The error response comes before any request.
    reader, writer = await connect(gateway)
    answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in head
    assert b"retry-after: 1" in head
    check_error(body, "overloaded")
    await leave((reader, writer))
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        assert (await http.get("/health")).status_code == 503

    await leave(held.pop())
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    probe = await connect(gateway)
    assert await metric(probe, REFUSED) >= 2
    assert await metric(probe, IN_FLIGHT) == 3 + 1
    await leave(probe, *held)


async def test_refused_connections_have_a_limit_too(another: Start) -> None:
    gateway = another(max_connections=1)
    ((_, held),) = await begin_uploads(gateway, 1)
    before = num_files(gateway)
    crowd = await asyncio.gather(*(connect(gateway) for _ in range(3 * MAX_LINGERING)))
    answers = await asyncio.gather(*(reader.read() for reader, _ in crowd), return_exceptions=True)
    assert num_files(gateway) <= before + MAX_LINGERING
    refused = [
        answer
        for answer in answers
        if isinstance(answer, bytes) and answer.startswith(b"HTTP/1.1 503")
    ]
    assert len(refused) >= MAX_LINGERING
    await leave(held, *crowd)


async def test_refused_tls_connections_get_a_503(another: Start, tmp_path: Path) -> None:
    trust = await certificate(tmp_path)
    gateway = another(tls_cert="cert.pem", tls_key="key.pem", max_connections=1)
    ((_, held),) = await begin_uploads(gateway, 1, trust=trust)
    refused = await connect(gateway, trust)
    head, body = await get(refused)
    assert head.startswith(b"HTTP/1.1 503")
    check_error(body, "overloaded")
    assert not held[0].at_eof()
    await leave(held, refused)


async def test_a_missing_handshake_times_out(another: Start, tmp_path: Path) -> None:
    await certificate(tmp_path)
    gateway = another(tls_cert="cert.pem", tls_key="key.pem", header_timeout_s=0.5)
    reader, writer = await connect(gateway)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    await leave((reader, writer))


async def test_pending_handshakes_count_as_connections(another: Start, tmp_path: Path) -> None:
    trust = await certificate(tmp_path)
    gateway = another(
        tls_cert="cert.pem", tls_key="key.pem", max_connections=8, header_timeout_s=3.0
    )
    before = num_files(gateway)
    silent = [await connect(gateway) for _ in range(32)]
    # The oldest ones close for the others.
    async with asyncio.timeout(20):
        for reader, _ in silent[:24]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert num_files(gateway) <= before + 8
        client = await connect(gateway, trust)
        assert (await get(client))[0].startswith(b"HTTP/1.1 200")
        # The others end when their time is over.
        for reader, _ in silent[24:]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    await leave(client, *silent)


ANSWER = question() | {
    "stream": True,
    "n": 8,
    "max_tokens": 900,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}


@pytest.mark.parametrize(
    "request_",
    [post("/v1/chat/completions", ANSWER), HEALTH.replace(b"/health", b"/openapi.json") * 300],
    ids=["a stream", "many answers"],
)
async def test_a_client_that_does_not_read_is_disconnected(another: Start, request_: bytes) -> None:
    gateway = another(send_timeout_s=0.5)
    host, port = gateway.url.partition("://")[2].split(":")
    other = await connect(gateway)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(request_)
        async with asyncio.timeout(30):
            while await metric(other, SLOW) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            while await metric(other, IN_FLIGHT) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    await leave(other)


Ts = TypeVarTuple("Ts")


class Clock(asyncio.BaseEventLoop):
    """Event loop whose timers run when a test calls `strike`."""

    def __init__(self) -> None:
        super().__init__()
        self.later: list[tuple[asyncio.TimerHandle, Callable[[], object]]] = []

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(delay, callback, args, self, context)
        self.later.append((handle, lambda: callback(*args)))
        return handle

    def strike(self) -> None:
        due, self.later = self.later, []
        for handle, callback in due:
            if not handle.cancelled():
                callback()


class Unread(asyncio.Transport):
    size = 0
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def test_a_client_that_reads_slowly_is_not_disconnected() -> None:
    clock, transport, slow = Clock(), Unread(), Counter()
    places = ConnectionPlaces(8, [])
    limits = ConnectionLimits(GatewayConfig(), places, Counter(), Counter(), slow)
    place = Place("127.0.0.1", close=transport.abort)
    places.open(place)
    config = uvicorn.Config(lambda: None)
    config.load()
    protocol = LimitedHttpProtocol(
        limits, config, place=place, server_state=ServerState(), app_state={}, _loop=clock
    )
    protocol.connection_made(transport)
    clock.later.clear()
    transport.size = 100_000
    protocol.pause_writing()
    for size in (99_999, 50_000, 1):
        transport.size = size
        clock.strike()
        assert not transport.aborted
    # The last few bytes were read before the buffer filled again, so the client made progress.
    transport.size = 70_000
    protocol.pause_writing()
    clock.strike()
    assert not transport.aborted
    protocol.resume_writing()
    transport.size = 0
    clock.strike()
    assert not clock.later
    assert slow.value == 0

    transport.size = 70_000
    protocol.pause_writing()
    clock.strike()
    assert transport.aborted
    assert slow.value == 1
    clock.close()


async def test_a_client_that_pauses_reading_gets_the_whole_answer(another: Start) -> None:
    gateway = another(send_timeout_s=6.0)
    connection = await connect(gateway)
    reader, writer = connection
    writer.write(HEALTH.replace(b"/health", b"/openapi.json") * 300)
    for pause_s in (2, 4.5):
        await asyncio.sleep(pause_s)
        # This is more data than the buffers of the connection take.
        for _ in range(150):
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length))
    assert await metric(connection, SLOW) == 0
    await leave(connection)


def test_the_file_limit_covers_all_connections(gateway: Gateway) -> None:
    limits = Path(f"/proc/{gateway.process.pid}/limits").read_text().splitlines()
    (line,) = [line for line in limits if line.startswith("Max open files")]
    assert int(line.split()[3]) >= 1024 + OTHER_FILES
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 1024 + OTHER_FILES


async def test_a_silent_connection_times_out(another: Start) -> None:
    gateway = another(header_timeout_s=0.5)
    silent = await connect(gateway)
    # An idle connection has more time, but only until data arrives that is no request.
    idle, blank = await connect(gateway), await connect(gateway)
    for connection in (idle, blank):
        await get(connection)
    blank[1].write(b"\r\n")
    async with asyncio.timeout(10):
        for reader, _ in (silent, blank):
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
    assert (await get(idle))[0].startswith(b"HTTP/1.1 200")
    await leave(silent, idle, blank)


async def test_endless_blank_lines_time_out(another: Start) -> None:
    gateway = another(header_timeout_s=0.5)
    reader, writer = await connect(gateway)
    await get((reader, writer))

    async def trickle() -> None:
        while not writer.is_closing():
            writer.write(b"\r\n")
            await asyncio.sleep(0.1)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(10):
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
    trickling.cancel()
    await leave((reader, writer))
