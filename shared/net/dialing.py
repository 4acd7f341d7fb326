"""Connections to servers named by clients: names are resolved once, and dialled by address.

All addresses of a name must be allowed, and connections are made to these addresses, never to the
name. So a name that later resolves to a private address does not lead into the operator's network.
"""

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from itertools import chain, zip_longest

import aiodns
import httpcore2

from shared.net.ip_policy import (
    Address,
    Network,
    may_be_translated,
    may_dial,
    parse_address,
    translators_of,
)
from shared.net.targets import Target

MAX_DIALLED = 8
"""Maximum number of addresses of one name to try."""
DIAL_DELAY_S = 0.25
"""Pause before the next address is tried, while earlier ones have not answered (RFC 8305)."""

FRESH_S = 3600.0
"""Time for which the local network's translators are cached."""
_NO_SUCH_RECORDS = (aiodns.error.ARES_ENODATA, aiodns.error.ARES_ENOTFOUND)


class AddressBlocked(Exception):
    """Raised for a host with an address that must not be dialled."""


class NameNotResolved(OSError):
    """Raised when a name has no address, or no name server has answered."""


def url_of(target: Target) -> httpcore2.URL:
    return httpcore2.URL(
        scheme=target.scheme, host=target.host, port=target.port, target=target.path
    )


def check_addresses(
    addresses: Sequence[Address],
    allowed: Sequence[Network],
    translators: Sequence[IPv6Network],
    *,
    only_allowed: bool = False,
) -> list[str]:
    """Return the addresses to dial, alternating between address families.

    Raises AddressBlocked if any address must not be dialled, because an attacker may mix a private
    address with public ones. Raises NameNotResolved without an address.
    """
    if not addresses:
        raise NameNotResolved("the name has no address")
    families: dict[int, list[str]] = {}
    for address in addresses:
        inside = any(address in net for net in allowed if net.version == address.version)
        if not inside and (only_allowed or not may_dial(address, allowed, translators)):
            raise AddressBlocked
        families.setdefault(address.version, []).append(str(address))
    turns = chain.from_iterable(zip_longest(*families.values()))
    return [text for text in turns if text is not None][:MAX_DIALLED]


class Resolver:
    """Resolver of names, from the hosts file and from name servers.

    If a name server does not answer, the system's resolver blocks a thread for half a minute and
    cannot be cancelled. Queries of this resolver need no thread, and can be cancelled.
    """

    def __init__(self) -> None:
        self._dns: aiodns.DNSResolver | None = None
        self._translators: list[IPv6Network] | None = None
        self._fresh_until_s = 0.0

    async def resolve(self, host: str) -> list[Address]:
        """Return the addresses of a name. Raises NameNotResolved."""
        if (number := _parse_number(host)) is not None:
            return [number]
        try:
            return await self._query(host, socket.AF_UNSPEC)
        except aiodns.error.DNSError as error:
            raise NameNotResolved(str(error)) from None

    async def translators(self) -> list[IPv6Network]:
        """Return the prefixes of the local network's NAT64 (RFC 7050). Raises NameNotResolved."""
        if self._translators is None or time.monotonic() > self._fresh_until_s:
            try:
                answer = await self._query("ipv4only.arpa", socket.AF_INET6)
            except aiodns.error.DNSError as error:
                if error.args[0] not in _NO_SUCH_RECORDS:
                    raise NameNotResolved(str(error)) from None
                answer = []
            self._translators = [
                prefix
                for address in answer
                if isinstance(address, IPv6Address)
                for prefix in translators_of(address)
            ]
            self._fresh_until_s = time.monotonic() + FRESH_S
        return self._translators

    async def _query(self, host: str, family: socket.AddressFamily) -> list[Address]:
        if self._dns is None:
            # Created here, because a resolver is bound to the running event loop.
            self._dns = aiodns.DNSResolver()
        answer = await self._dns.getaddrinfo(host, family=family, type=socket.SOCK_STREAM)
        return [parse_address(node.addr[0].decode()) for node in answer.nodes]

    async def close(self) -> None:
        if self._dns is not None:
            await self._dns.close()


def _parse_number(host: str) -> Address | None:
    """Return the address that a host consists of, in any spelling that the C library accepts."""
    with contextlib.suppress(ValueError):
        return parse_address(host)
    with contextlib.suppress(OSError):
        return IPv4Address(socket.inet_aton(host))
    return None


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Network backend that connects only to checked addresses."""

    def __init__(
        self, resolver: Resolver, allowed: Sequence[Network], *, only_allowed: bool = False
    ) -> None:
        """With `only_allowed`, addresses of the public internet are refused too."""
        self._resolver = resolver
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
        async with asyncio.timeout(timeout):
            resolved = await self._resolver.resolve(host)
            translators = []
            if any(map(may_be_translated, resolved)):
                translators = await self._resolver.translators()
            addresses = check_addresses(
                resolved, self._allowed, translators, only_allowed=self._only_allowed
            )
            return await self._dial_any(addresses, port, local_address, socket_options)

    async def _dial_any(
        self,
        addresses: list[str],
        port: int,
        local_address: str | None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None,
    ) -> httpcore2.AsyncNetworkStream:
        """Return the first established connection. Raises the error of the last failed attempt."""
        waiting = deque(addresses)
        dialling: set[_Dial] = set()
        connections: list[httpcore2.AsyncNetworkStream] = []
        failure: BaseException = NameNotResolved("the name has no address")
        try:
            while not connections and (waiting or dialling):
                if waiting:
                    address = waiting.popleft()
                    dial = self._dial.connect_tcp(
                        address, port, None, local_address, socket_options
                    )
                    dialling.add(asyncio.create_task(dial))
                done, dialling = await asyncio.wait(
                    dialling,
                    timeout=DIAL_DELAY_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    if (error := task.exception()) is None:
                        connections.append(task.result())
                    else:
                        failure = error
            if not connections:
                raise failure
            return connections.pop()
        finally:
            for stream in connections + await _stop(dialling):
                await stream.aclose()


_Dial = asyncio.Task[httpcore2.AsyncNetworkStream]


async def _stop(dialling: set[_Dial]) -> list[httpcore2.AsyncNetworkStream]:
    """Cancel the tasks, and return the connections of tasks that had already ended."""
    for task in dialling:
        task.cancel()
    results = await asyncio.gather(*dialling, return_exceptions=True)
    return [result for result in results if not isinstance(result, BaseException)]
