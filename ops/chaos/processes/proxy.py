"""A TCP proxy that misbehaves on demand, between a client and a nats-server.

It does not interpret the bytes. A direction may delay all bytes, or hold them, as in a partition:
no byte arrives and none is lost, and after `heal` all of them arrive.
"""

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass

CHUNK_BYTES = 65_536
# Chunks in transit in one direction; networks do not buffer more.
QUEUE_LEN = 64
CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Behavior:
    """Behaviour of one direction of all connections."""

    holds: bool = False
    delay_s: float = 0.0


class Proxy:
    """Proxy from `port`, a free one, to `target_port`, both on the loopback device."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.port = 0
        self.up = Behavior()
        """From clients to the server."""
        self.down = Behavior()
        self._links: set[Link] = set()
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._links)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._links)

    # -- faults -----------------------------------------------------------------------------

    async def set(self, up: Behavior | None = None, down: Behavior | None = None) -> None:
        """Set the behaviour of both directions; an omitted direction passes bytes."""
        async with self._changed:
            self.up, self.down = up or Behavior(), down or Behavior()
            self._changed.notify_all()

    async def blackhole(self, *, up: bool = True, down: bool = True) -> None:
        await self.set(Behavior(holds=up), Behavior(holds=down))

    def cut(self) -> None:
        """Reset every connection, both ends."""
        for link in list(self._links):
            link.reset()

    def cut_after(self, num_bytes: int) -> None:
        """Reset each living connection once its client has received `num_bytes` more."""
        for link in self._links:
            link.pumps[1].budget = num_bytes

    def half_open(self) -> None:
        """Close the server's end of each connection without notice to the client."""
        for link in list(self._links):
            link.close_silently()

    async def heal(self) -> None:
        await self.set()
        for link in [link for link in self._links if link.is_half_open]:
            link.reset()

    # -- plumbing ---------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far = await asyncio.open_connection("127.0.0.1", self._target_port)
        except (OSError, TimeoutError):
            _reset(writer)
            return
        link = Link(self, (reader, writer), far)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)
            async with self._changed:
                self._changed.notify_all()

    async def wait_until_open(self, upward: bool) -> Behavior:
        """Return the behaviour of a direction once it is not on hold."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._behavior(upward).holds)
        return self._behavior(upward)

    def _behavior(self, upward: bool) -> Behavior:
        return self.up if upward else self.down


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """A client's connection and the corresponding connection to the server."""

    def __init__(self, proxy: Proxy, near: Stream, far: Stream) -> None:
        self._writers = (near[1], far[1])
        self.pumps = (
            Pump(proxy, near[0], far[1], upward=True),
            Pump(proxy, far[0], near[1], upward=False),
        )
        self.is_half_open = False
        self._cut = asyncio.Event()

    async def run(self) -> None:
        """Run until one end closes; then close the other, unless the link is half open."""
        pumps = {asyncio.create_task(pump.run()) for pump in self.pumps}
        cut = asyncio.create_task(self._cut.wait())
        try:
            _, left = await asyncio.wait({*pumps, cut}, return_when=asyncio.FIRST_COMPLETED)
            if self.is_half_open and not self._cut.is_set():
                await asyncio.wait(left - {cut})
        finally:
            for task in (*pumps, cut):
                task.cancel()
            await asyncio.gather(*pumps, cut, return_exceptions=True)
            for writer in self._writers:
                writer.close()

    def reset(self) -> None:
        self._cut.set()
        for writer in self._writers:
            _reset(writer)

    def close_silently(self) -> None:
        self.is_half_open = True
        for pump in self.pumps:
            pump.discards = True
        self._writers[1].transport.abort()


class Pump:
    """Transfer of bytes in one direction of one link."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        upward: bool,
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._upward = upward
        self._in_transit: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUE_LEN)
        self.discards = False
        """The far end is closed, and bytes are discarded."""
        self.budget: int | None = None
        """Bytes until the connection is cut."""

    async def run(self) -> None:
        """Run until the source or the sink closes or the budget is used up."""
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while data := await self._reader.read(CHUNK_BYTES):
            behavior = await self._proxy.wait_until_open(self._upward)
            if not self.discards:
                await self._in_transit.put((loop.time() + behavior.delay_s, data))
        await self._in_transit.join()
        # The close of one end does not pass a partition either.
        await self._proxy.wait_until_open(self._upward)

    async def _send(self) -> None:
        """Send until the budget is used up."""
        loop = asyncio.get_running_loop()
        while self.budget is None or self.budget > 0:
            due, data = await self._in_transit.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._proxy.wait_until_open(self._upward)
            if self.budget is not None:
                data, self.budget = data[: self.budget], self.budget - len(data)
            with contextlib.suppress(OSError):
                self._writer.write(data)
                await self._writer.drain()
            self._in_transit.task_done()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST instead of a FIN, and drop what was not sent."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
