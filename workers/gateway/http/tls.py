"""TLS accept loop: a connection counts as open from its handshake on.

The event loop's own server counts nothing before a handshake has ended, so clients that never begin
theirs could use up all file descriptors of the process.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from shared.helpers.task_set import TaskSet
from workers.gateway.http.connection import MAX_REJECTED, ConnectionLimits

# Pause after a failed accept: there are no free file descriptors, or the network is down. Both pass
# by themselves.
PAUSE_S = 0.1


@dataclass(eq=False)
class TlsServer:
    """Accepts TLS connections. It has the part of asyncio.Server's interface that uvicorn uses."""

    limits: ConnectionLimits
    listener: socket.socket
    tls: ssl.SSLContext
    make_protocol: Callable[[], asyncio.Protocol]
    """Called for each connection whose handshake has begun."""
    num_connections: Callable[[], int]
    """Counts the connections whose handshake has ended."""

    def __post_init__(self) -> None:
        self._handshakes = TaskSet()
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
        max_open = self.limits.max_connections + MAX_REJECTED
        while True:
            try:
                sock, _ = await loop.sock_accept(self.listener)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            if self.num_connections() + len(self._handshakes) < max_open:
                self._handshakes.start(self._handshake(sock))
            else:
                self.limits.refused.add()
                sock.close()

    async def _handshake(self, sock: socket.socket) -> None:
        # There is no one to report a failed handshake to: the client's own library sees it.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self.make_protocol,
                sock,
                ssl=self.tls,
                ssl_handshake_timeout=self.limits.config.header_timeout_s,
            )
