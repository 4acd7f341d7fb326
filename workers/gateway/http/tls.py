"""Connections that are to have TLS: until they do, they take a place like any other.

The event loop's own server counts nothing before a handshake has ended, and clients that never
begin theirs could have all the files that the process may open.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from workers.gateway.http.connection import MAX_REJECTED, ConnectionLimits

# There are no files left, or the network is: both pass by themselves.
PAUSE_S = 0.1


class TlsServer:
    """Accepts connections; a server as far as uvicorn needs one."""

    def __init__(
        self,
        entrance: ConnectionLimits,
        listener: socket.socket,
        tls: ssl.SSLContext,
        connection: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
    ) -> None:
        """`connection` is made for each that has TLS; `num_connections` counts them."""
        self._entrance = entrance
        self._listener = listener
        self._tls = tls
        self._connection = connection
        self._num_connections = num_connections
        self._shaking: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._shaking):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._shaking, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        # One that is too many is told so once it can be, if these are not a crowd themselves.
        most = self._entrance.max_connections + MAX_REJECTED
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            if self._num_connections() + len(self._shaking) < most:
                task = asyncio.create_task(self._shake(sock))
                self._shaking.add(task)
                task.add_done_callback(self._shaking.discard)
            else:
                self._entrance.refused.add()
                sock.close()

    async def _shake(self, sock: socket.socket) -> None:
        # What goes wrong is between the client and its library: there is nobody to be told.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._entrance.header_timeout_s,
            )
