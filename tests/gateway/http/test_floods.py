"""Large, slow, endless and fragmented requests at full size: they take little memory."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import Cluster
from tests.gateway.conftest import Gateway, start_gateway
from tests.gateway.http.test_connection import connect
from tests.gateway.http.test_middleware import PATH, POST, ask

MAX_GROWTH_BYTES = 64 * 10**6
SAMPLE_S = 0.01
CROWD = 500
MIB = 2**20
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

FLOODS = {
    "a header of 10 MB": (GET + b"X-Large: ", b"x" * 10**6, 10, b"431"),
    "100,000 headers": (GET, b"X-Many: y\r\n" * 1000, 100, b"431"),
    "1,000,000 chunks": (CHUNKED, b"1\r\n \r\n" * 1000, 1000, b"413"),
    "2 GB with a length": (POST + b"Content-Length: %d\r\n\r\n" % 2**31, b" " * MIB, 2048, b"413"),
    "2 GB in chunks": (CHUNKED, b"100000\r\n" + b" " * MIB + b"\r\n", 2048, b"413"),
}
"""Start of the request, the data that is repeated, how often, and the status of the response."""


@pytest.fixture(scope="module")
def flooded(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("flooded")
    running = start_gateway(cluster, folder, max_body_mib=16, header_timeout_s=6.0)
    yield running
    running.stop()


def rss_bytes(gateway: Gateway) -> int:
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def little_growth(gateway: Gateway) -> Iterator[None]:
    """Assert that the memory of the process grows little at any time in the block."""
    most = before = rss_bytes(gateway)
    over = threading.Event()

    def sample() -> None:
        nonlocal most
        while not over.wait(SAMPLE_S):
            most = max(most, rss_bytes(gateway))

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        yield
    finally:
        over.set()
        sampling.join()
    assert max(most, rss_bytes(gateway)) - before < MAX_GROWTH_BYTES


async def check_it_answers(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as http:
        assert (await http.post(PATH, json=ask(max_tokens=1))).status_code == 200


async def flood(gateway: Gateway, head: bytes, piece: bytes, count: int) -> bytes:
    """Send `head` and `count` times `piece`, or as many as are accepted; return the response."""
    reader, writer = await connect(gateway)
    answer = bytearray()

    async def listen() -> None:
        with contextlib.suppress(ConnectionError):
            while more := await reader.read(65536):
                answer.extend(more)

    listening = asyncio.create_task(listen())
    with contextlib.suppress(ConnectionError):
        writer.write(head)
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
    await listening
    writer.close()
    return bytes(answer)


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_is_refused_with_little_memory(flooded: Gateway, kind: str) -> None:
    await check_it_answers(flooded)
    head, piece, count, status = FLOODS[kind]
    with little_growth(flooded):
        answer = await flood(flooded, head, piece, count)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:80]
    await check_it_answers(flooded)


async def test_many_dribbling_clients_take_little_memory(flooded: Gateway) -> None:
    await check_it_answers(flooded)

    async def dribble() -> bytes:
        reader, writer = await connect(flooded)
        writer.write(GET + b"X-Slow: ")
        answering = asyncio.create_task(reader.read(65536))
        while not answering.done():
            writer.write(b"x")
            await asyncio.wait({answering}, timeout=0.2)
        writer.close()
        return answering.result()

    with little_growth(flooded):
        crowd = [asyncio.create_task(dribble()) for _ in range(CROWD)]
        await asyncio.sleep(0.5)
        await check_it_answers(flooded)
        assert not any(client.done() for client in crowd)
        answers = await asyncio.gather(*crowd)
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
    await check_it_answers(flooded)
