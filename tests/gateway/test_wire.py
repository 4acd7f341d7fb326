"""Connections: how many there may be, and how long they may say nothing."""

import asyncio
import contextlib
import resource
import ssl
from pathlib import Path

import httpx

from tests.gateway.conftest import Gateway, Start
from tests.gateway.test_edge import certificate, check_error
from workers.gateway.wire import MAX_TURNED_AWAY
from workers.gateway.worker import OTHER_FILES

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
REFUSED = "pagemill_http_connections_refused_total"


async def connect(gateway: Gateway, trust: ssl.SSLContext | None = None) -> Connection:
    host, port = gateway.url.partition("://")[2].split(":")
    return await asyncio.open_connection(host, int(port), ssl=trust)


async def get(connection: Connection, request: bytes = HEALTH) -> tuple[bytes, bytes]:
    """Head and body of an answer that has a length."""
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    ]
    return head, await reader.readexactly(length)


def num_files(gateway: Gateway) -> int:
    return len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir()))


async def count_refused(connection: Connection) -> float:
    _, told = await get(connection, HEALTH.replace(b"/health", b"/metrics"))
    (line,) = [line for line in told.decode().splitlines() if line.startswith(REFUSED)]
    return float(line.rpartition(" ")[2])


async def test_connections_have_a_limit(another: Start) -> None:
    gateway = another(max_connections=4)
    held = [await connect(gateway) for _ in range(4)]
    for connection in held:
        assert (await get(connection))[0].startswith(b"HTTP/1.1 200")

    # It is told before it has asked for anything.
    reader, writer = await connect(gateway)
    answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in head
    assert b"retry-after: 1" in head
    check_error(body, "overloaded")
    writer.close()
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        assert (await http.get("/health")).status_code == 503

    assert await count_refused(held[0]) == 2
    for connection in held:
        assert (await get(connection))[0].startswith(b"HTTP/1.1 200")
    _, leaving = held.pop()
    leaving.close()
    await leaving.wait_closed()
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for _, writer in held:
        writer.close()


async def test_those_who_are_turned_away_are_no_crowd_of_their_own(another: Start) -> None:
    gateway = another(max_connections=1)
    held = await connect(gateway)
    assert (await get(held))[0].startswith(b"HTTP/1.1 200")
    before = num_files(gateway)
    crowd = await asyncio.gather(*(connect(gateway) for _ in range(3 * MAX_TURNED_AWAY)))
    answers = await asyncio.gather(*(reader.read() for reader, _ in crowd), return_exceptions=True)
    assert num_files(gateway) <= before + MAX_TURNED_AWAY
    told = [one for one in answers if isinstance(one, bytes) and one.startswith(b"HTTP/1.1 503")]
    assert len(told) >= MAX_TURNED_AWAY
    assert await count_refused(held) == len(crowd)
    for _, writer in [held, *crowd]:
        writer.close()


async def test_under_tls_they_are_told_as_well(another: Start, tmp_path: Path) -> None:
    trust = await certificate(tmp_path)
    gateway = another(tls_cert="cert.pem", tls_key="key.pem", max_connections=1)
    held = await connect(gateway, trust)
    assert (await get(held))[0].startswith(b"HTTP/1.1 200")
    refused = await connect(gateway, trust)
    head, body = await get(refused)
    assert head.startswith(b"HTTP/1.1 503")
    check_error(body, "overloaded")
    assert (await get(held))[0].startswith(b"HTTP/1.1 200")
    for _, writer in (held, refused):
        writer.close()


async def test_a_handshake_that_does_not_come_is_not_waited_for(
    another: Start, tmp_path: Path
) -> None:
    await certificate(tmp_path)
    gateway = another(tls_cert="cert.pem", tls_key="key.pem", header_timeout_s=0.5)
    reader, writer = await connect(gateway)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    writer.close()


def test_there_are_files_for_all_connections(gateway: Gateway) -> None:
    limits = Path(f"/proc/{gateway.process.pid}/limits").read_text().splitlines()
    (line,) = [line for line in limits if line.startswith("Max open files")]
    assert int(line.split()[3]) >= 1024 + OTHER_FILES
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 1024 + OTHER_FILES


async def test_who_says_nothing_is_not_waited_for(another: Start) -> None:
    gateway = another(header_timeout_s=0.5)
    silent = await connect(gateway)
    # An idle connection has longer, but not for what is no request.
    idle, blank = await connect(gateway), await connect(gateway)
    for connection in (idle, blank):
        await get(connection)
    blank[1].write(b"\r\n")
    async with asyncio.timeout(10):
        for reader, _ in (silent, blank):
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
    assert (await get(idle))[0].startswith(b"HTTP/1.1 200")
    for _, writer in (silent, idle, blank):
        writer.close()


async def test_blank_lines_without_an_end_are_no_request(another: Start) -> None:
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
    writer.close()
