"""The proxy misbehaves as ordered, on real sockets, and a real Bus survives it."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from ops.chaos.processes.proxy import Behavior, Proxy
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from tests.support.waiting import until

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """A server that answers with what it gets, and gateway_records how its connections ended."""

    def __init__(self) -> None:
        self.received = b""
        self.ended = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                self.received += data
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        self.ended.set()
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    server = Echo()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[Proxy]:
    between = Proxy(echo.port)
    await between.start()
    yield between
    await between.stop()


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[Stream]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield reader, writer
    writer.close()


async def say(client: Stream, data: bytes, answer: bytes | None = None) -> None:
    client[1].write(data)
    assert await client[0].readexactly(len(answer or data)) == (answer or data)


async def is_silent(reader: asyncio.StreamReader, for_s: float = 0.1) -> bool:
    try:
        async with asyncio.timeout(for_s):
            await reader.read(1)
    except TimeoutError:
        return True
    return False


async def all_gone(proxy: Proxy) -> None:
    # The kernel closes the connections.
    await until(lambda: not proxy.num_connections)


async def test_it_passes_everything_both_ways(client: Stream) -> None:
    await say(client, bytes(range(256)) * 4096)


async def test_a_partition_holds_what_is_said_until_it_is_healed(
    proxy: Proxy, client: Stream
) -> None:
    await say(client, b"before")
    await proxy.blackhole()
    client[1].write(b"during")
    assert await is_silent(client[0])
    await proxy.heal()
    assert await client[0].readexactly(6) == b"during"


async def test_one_direction_can_be_silent_alone(echo: Echo, proxy: Proxy, client: Stream) -> None:
    await say(client, b"x")
    await proxy.blackhole(up=False)
    client[1].write(b"heard")
    assert await is_silent(client[0])
    assert echo.received == b"xheard"
    await proxy.heal()
    assert await client[0].readexactly(5) == b"heard"


async def test_in_a_partition_even_the_end_is_not_heard(
    echo: Echo, proxy: Proxy, client: Stream
) -> None:
    await say(client, b"x")
    await proxy.blackhole()
    client[1].close()
    await asyncio.sleep(0.1)
    assert not echo.ended.is_set()
    await proxy.heal()
    async with asyncio.timeout(30):
        await echo.ended.wait()


async def test_delay(proxy: Proxy, client: Stream) -> None:
    await proxy.set(up=Behavior(delay_s=0.1), down=Behavior(delay_s=0.05))
    began = time.monotonic()
    await say(client, b"slow")
    assert 0.14 < time.monotonic() - began < 5


async def test_a_cut_in_the_middle_of_a_frame(echo: Echo, proxy: Proxy, client: Stream) -> None:
    await say(client, b"x")
    proxy.cut_after(3)
    client[1].write(b"abcdef")
    assert await client[0].readexactly(3) == b"abc"
    assert await client[0].read() == b""
    async with asyncio.timeout(30):
        await echo.ended.wait()


async def test_all_connections_cut_at_once(echo: Echo, proxy: Proxy, client: Stream) -> None:
    await say(client, b"x")
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        await client[0].read()
    async with asyncio.timeout(30):
        await echo.ended.wait()
    await all_gone(proxy)


async def test_half_open_the_server_is_gone_without_notice_to_the_client(
    echo: Echo, proxy: Proxy, client: Stream
) -> None:
    await say(client, b"x")
    proxy.half_open()
    async with asyncio.timeout(30):
        await echo.ended.wait()
    client[1].write(b"anybody?")
    assert await is_silent(client[0])
    assert proxy.num_connections == 1
    client[1].close()
    await all_gone(proxy)


async def test_a_bus_finds_back_after_a_partition(broker: EmbeddedServer) -> None:
    proxy = Proxy(broker.port)
    await proxy.start()
    bus = await Bus.connect(proxy.url, "test")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    await proxy.blackhole()
    # Longer than the pings need to give the connection up.
    await asyncio.sleep(7)
    await proxy.heal()
    began = time.monotonic()
    await bus.publish(subjects.cancel("partition"), b"", "partition")
    assert time.monotonic() - began < 5
    await bus.close()
    await proxy.stop()
