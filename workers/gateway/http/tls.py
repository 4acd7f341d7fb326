"""TLS accept loop: a connection counts as open from its handshake on.

The event loop's own server counts nothing before a handshake has ended, so clients that never begin
theirs could use up all file descriptors of the process.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from workers.gateway.http.connection import MAX_REJECTED, ConnectionLimits

# Pause after a failed accept: there are no free file descriptors, or the network is down. Both pass
# by themselves.
PAUSE_S = 0.1


class TlsServer:
    """Accepts TLS connections. It has the part of asyncio.Server's interface that uvicorn uses."""

    def __init__(
        self,
        limits: ConnectionLimits,
        listener: socket.socket,
        tls: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
    ) -> None:
        """`make_protocol` is called for each connection whose handshake has begun;
        `num_connections` counts those whose handshake has ended."""
        self._limits = limits
        self._listener = listener
        self._tls = tls
        self._make_protocol = make_protocol
        self._num_connections = num_connections
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        # A connection over the limit gets an error response after its handshake, as long as the
        # rejected ones are few themselves.
        max_open = self._limits.max_connections + MAX_REJECTED
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            if self._num_connections() + len(self._handshakes) < max_open:
                task = asyncio.create_task(self._handshake(sock))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
            else:
                self._limits.refused.add()
                sock.close()

    async def _handshake(self, sock: socket.socket) -> None:
        # There is no one to report a failed handshake to: the client's own library sees it.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.header_timeout_s,
            )
