"""TLS accept loop: a connection counts as open from its handshake on.

A server of asyncio counts a connection only after its handshake, so clients that never begin one
could use up all file descriptors of the process.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from shared.helpers.task_set import TaskSet
from workers.gateway.http.connection import MAX_REJECTED, ConnectionLimits

# Pause after a failed accept: there are no free file descriptors, or the network is down. Both pass
# by themselves.
PAUSE_S = 0.1


class Acceptor:
    """Accepts TLS connections. It has the part of asyncio.Server's interface that uvicorn uses."""

    def __init__(
        self,
        limits: ConnectionLimits,
        listener: socket.socket,
        tls: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
    ) -> None:
        """`num_connections` returns the number of open connections after their handshakes."""
        self._limits = limits
        self._listener = listener
        self._tls = tls
        self._make_protocol = make_protocol
        self._num_connections = num_connections
        self._handshakes = TaskSet()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        # A connection over the limit gets an error response after its handshake, while fewer than
        # MAX_REJECTED others do.
        max_open = self._limits.max_connections + MAX_REJECTED
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            if self._num_connections() + len(self._handshakes) < max_open:
                self._handshakes.start(self._handshake(sock))
            else:
                self._limits.refused.add()
                sock.close()

    async def _handshake(self, sock: socket.socket) -> None:
        # A failed handshake needs no report: the client's TLS library notices it.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.config.header_timeout_s,
            )
