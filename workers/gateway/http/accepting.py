"""Accept loop: a connection has its place from the moment at which it is accepted.

A server of asyncio counts a TLS connection only after its handshake, so clients that never begin
one could use up all file descriptors of the process. It also accepts many connections before it
reports the first, so that a burst could do the same.
"""

import asyncio
import socket
import ssl
from functools import partial
from typing import Protocol

from shared.helpers.task_set import TaskSet
from workers.gateway.http.connection import ConnectionLimits
from workers.gateway.http.places import Place, network_of

# Pause after a failed accept: there are no free file descriptors, or the network is down. Both pass
# by themselves.
PAUSE_S = 0.1


class ProtocolFactory(Protocol):
    def __call__(self, *, place: Place) -> asyncio.Protocol: ...


class Acceptor:
    """Accepts connections. It has the part of asyncio.Server's interface that uvicorn uses."""

    def __init__(
        self,
        limits: ConnectionLimits,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        make_protocol: ProtocolFactory,
    ) -> None:
        self._limits = limits
        self._listener = listener
        self._tls = tls
        self._make_protocol = make_protocol
        self._connecting = TaskSet()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._connecting):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._connecting, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            place = Place(network_of(address[0]), close=sock.close)
            if self._limits.admit(place):
                task = self._connecting.start(self._connect(sock, place))
                place.close = partial(_cancel, task)
            else:
                sock.close()
            # The task begins before it can be cancelled for another connection, and connections
            # that were closed release their descriptors.
            await asyncio.sleep(0)

    async def _connect(self, sock: socket.socket, place: Place) -> None:
        handshake_s = None if self._tls is None else self._limits.config.header_timeout_s
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(place=place),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
            )
        except BaseException as error:
            self._limits.leave(place)
            # A failed handshake needs no report: the client's TLS library notices it.
            if not isinstance(error, OSError):
                raise


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
