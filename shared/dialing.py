"""Connections to servers that clients name: resolved once, and dialled by address.

All addresses of a name must be allowed, and the connection is made to one of them, never to the
name. So a name that later has another address gets nobody into our network.
"""

import asyncio
import socket
from collections.abc import Iterable, Sequence

import httpcore2

from shared.ip_policy import Network, may_dial, parse_address
from shared.targets import Target


class AddressBlocked(Exception):
    """A host has an address that may not be dialled."""


def url_of(target: Target) -> httpcore2.URL:
    return httpcore2.URL(
        scheme=target.scheme, host=target.host, port=target.port, target=target.path
    )


def check_addresses(
    addresses: Sequence[str], allowed: Sequence[Network], *, only_allowed: bool = False
) -> str:
    """Return the address to dial. Raises AddressBlocked.

    An attacker mixes a private address with public ones, so one bad address refuses all.
    """
    for text in addresses:
        address = parse_address(text)
        inside = any(address in net for net in allowed if net.version == address.version)
        if not inside and (only_allowed or not may_dial(address, allowed)):
            raise AddressBlocked
    return addresses[0]


class GuardedAsyncBackend(httpcore2.AsyncNetworkBackend):
    """Network backend of asyncio, through which every connection goes to a checked address."""

    def __init__(self, allowed: Sequence[Network], *, only_allowed: bool = False) -> None:
        """With `only_allowed`, not even the public internet is dialled."""
        self._allowed = allowed
        self._only_allowed = only_allowed
        self._dial = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        address = check_addresses(
            [str(entry[4][0]) for entry in found],
            self._allowed,
            only_allowed=self._only_allowed,
        )
        return await self._dial.connect_tcp(address, port, timeout, local_address, socket_options)
