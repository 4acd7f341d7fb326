"""Fetcher: downloads media from other servers without exposing the internal network.

A URL is parsed once, strictly, and the connection uses only the parsed parts. A host name is
resolved once. All of its addresses must be allowed, and the connection is made to one of these
addresses, not to the name. Each redirect is checked in the same way. One deadline covers the whole
fetch, from the first name to the last byte.
"""

import asyncio
from collections.abc import AsyncIterable, Iterable, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_network
from urllib.parse import urljoin
from weakref import WeakValueDictionary

import httpcore2

from shared.config.schema import RendererConfig
from shared.errors import InvalidMedia, MediaBlocked, MediaTooLarge
from shared.net.dialing import AddressBlocked, GuardedBackend, NameNotResolved, Resolver, url_of
from shared.net.targets import Target, parse_target
from shared.protocol.multimodal import AUDIO, DOCUMENT, IMAGE, VIDEO, FileKind
from shared.tenants.fair_turns import FairTurns

MAX_REDIRECTS = 3
MAX_FETCHES = 32
MAX_FETCHES_OF_TENANT = 8
"""Limits on simultaneous fetches. Further fetches wait, and tenants take turns."""
MAX_HELD = 1024
"""Limit on fetches that are in progress or wait."""

_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = [
    # An uncompressed body cannot grow when it is read.
    ("Accept-Encoding", "identity"),
    ("User-Agent", "pagemill"),
]
_ACCEPTED: Mapping[FileKind, str] = {
    IMAGE: "image/jpeg, image/png, image/webp",
    VIDEO: "video/*, image/gif, image/webp, image/png",
    AUDIO: "audio/*",
    DOCUMENT: "application/pdf",
}


def parse_url(url: str, field: str) -> Target:
    """Parse a URL. Raises InvalidMedia for a URL that two parsers could read differently."""
    target = parse_target(url)
    if target is None:
        raise InvalidMedia("the URL is not a plain http or https URL", field=field)
    return target


class Fetcher:
    """Fetches media by HTTP. Belongs to one event loop."""

    def __init__(self, config: RendererConfig) -> None:
        """Raises ValueError for an invalid network in `media_networks`."""
        self._config = config
        networks = [ip_network(text) for text in config.media_networks]
        self._resolver = Resolver()
        self._pool = httpcore2.AsyncConnectionPool(
            # One context for all connections: creating one reads a file of certificates.
            ssl_context=httpcore2.default_ssl_context(),
            max_connections=MAX_FETCHES,
            # On a reused connection, extra bytes after a response would answer the next request.
            max_keepalive_connections=0,
            network_backend=GuardedBackend(self._resolver, networks),
        )
        self._turns = FairTurns(MAX_FETCHES, "media files are being fetched already")
        self._of_tenants: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def fetch(self, url: str, field: str, kind: FileKind = IMAGE, tenant: str = "") -> bytes:
        """Return the body of the response, which is not longer than the limit of the kind.

        Raises MediaBlocked for a host or address that is not allowed, MediaTooLarge, InvalidMedia,
        or Overloaded.
        """
        of_tenant = self._of_tenants.setdefault(tenant, asyncio.Semaphore(MAX_FETCHES_OF_TENANT))
        try:
            async with of_tenant, self._turns.turn(tenant, MAX_HELD):
                async with asyncio.timeout(self._config.fetch_timeout_s):
                    return await self._follow(url, field, kind)
        except AddressBlocked:
            raise MediaBlocked(f"the {kind}'s host is not on the internet", field=field) from None
        except NameNotResolved:
            raise InvalidMedia(f"the {kind}'s host has no address", field=field) from None
        except (
            OSError,
            ValueError,
            TimeoutError,
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
        ):
            raise InvalidMedia(f"the {kind} could not be fetched in time", field=field) from None

    async def close(self) -> None:
        await self._pool.aclose()
        await self._resolver.close()

    async def _follow(self, url: str, field: str, kind: FileKind) -> bytes:
        """Return the body at the end of all redirects."""
        for _ in range(1 + MAX_REDIRECTS):
            target = parse_url(url, field)
            if not any(fnmatchcase(target.host, host) for host in self._config.media_hosts):
                raise MediaBlocked(
                    "media are not fetched from this host (renderer.media_hosts)", field=field
                )
            body_or_location = await self._get(target, field, kind)
            if isinstance(body_or_location, bytes):
                return body_or_location
            url = urljoin(url, body_or_location)
        raise InvalidMedia(f"more than {MAX_REDIRECTS} redirects", field=field)

    async def _get(self, target: Target, field: str, kind: FileKind) -> bytes | str:
        """Return the body, or the location of a redirect."""
        headers = [("Host", target.host_header), ("Accept", _ACCEPTED[kind]), *_HEADERS]
        async with self._pool.stream("GET", url_of(target), headers=headers) as response:
            if response.status in _REDIRECTS:
                return _location(response.headers)
            if response.status != 200:
                raise InvalidMedia(f"the {kind}'s server answered {response.status}", field=field)
            return await self._read(response.aiter_stream(), field, kind)

    async def _read(self, chunks: AsyncIterable[bytes], field: str, kind: FileKind) -> bytes:
        limit = self._config.max_bytes[kind]
        body = bytearray()
        async for chunk in chunks:
            body += chunk
            if len(body) > limit:
                raise MediaTooLarge(
                    f"the {kind} has more than the limit of {limit} bytes", field=field
                )
        return bytes(body)


def _location(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name.lower() == b"location":
            return value.decode("ascii")  # raises ValueError for any other character
    raise ValueError("a redirect without a location")
