"""Fetcher: downloads media from other servers without giving them a path into our network.

A URL is parsed once, strictly, and the connection uses the parsed parts only. A host name is
resolved once; all of its addresses must be allowed, and the connection is made to one of these
addresses, not to the name. Each redirect is treated in the same way. One deadline covers the whole
fetch, from the first name to the last byte. All functions block.
"""

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from ipaddress import ip_network
from typing import Any
from urllib.parse import urljoin

import httpcore2

from shared.config_renderer import RendererConfig
from shared.dialing import AddressBlocked, check_addresses, url_of
from shared.errors import InvalidMedia, MediaBlocked, MediaTooLarge
from shared.ip_policy import Network
from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, Modality
from shared.targets import Target, parse_target

MAX_REDIRECTS = 3
MAX_CONNECTIONS = 16

_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = [
    # An uncompressed body cannot grow when it is read.
    ("Accept-Encoding", "identity"),
    ("User-Agent", "pagemill"),
]
_ACCEPTED = {
    IMAGE: "image/jpeg, image/png, image/webp",
    VIDEO: "video/*, image/gif, image/webp, image/png",
    AUDIO: "audio/*",
}


def parse_url(url: str, field: str) -> Target:
    """Raises InvalidMedia for a URL that two parsers could read in two ways."""
    target = parse_target(url)
    if target is None:
        raise InvalidMedia("the URL is not a plain http or https URL", field=field)
    return target


class Fetcher:
    """Thread-safe."""

    def __init__(self, config: RendererConfig) -> None:
        """Raises ValueError for a text in `media_networks` that is no network."""
        self._config = config
        networks = [ip_network(text) for text in config.media_networks]
        self._pool = httpcore2.ConnectionPool(
            # A context reads a file of certificates; the pool would make one per connection.
            ssl_context=httpcore2.default_ssl_context(),
            max_connections=MAX_CONNECTIONS,
            # On a reused connection, bytes behind an answer would answer the next request.
            max_keepalive_connections=0,
            network_backend=_GuardedBackend(networks),
        )

    def fetch(self, url: str, field: str, modality: Modality = IMAGE) -> bytes:
        """Return the body of the answer, which is not longer than the limit of the modality.

        Raises MediaBlocked for a host or address that is not allowed, MediaTooLarge, or
        InvalidMedia.
        """
        deadline = time.monotonic() + self._config.fetch_timeout_s
        for _ in range(1 + MAX_REDIRECTS):
            target = parse_url(url, field)
            if not any(fnmatchcase(target.host, host) for host in self._config.media_hosts):
                raise MediaBlocked(
                    "media are not fetched from this host (renderer.media_hosts)", field=field
                )
            body_or_location = self._get(target, deadline, field, modality)
            if isinstance(body_or_location, bytes):
                return body_or_location
            url = urljoin(url, body_or_location)
        raise InvalidMedia(f"more than {MAX_REDIRECTS} redirects", field=field)

    def _get(self, target: Target, deadline: float, field: str, modality: Modality) -> bytes | str:
        """Return the body, or the location of a redirect."""
        # Deadlines for `_GuardedBackend`; the pool's own timeout is a duration.
        deadlines = dict.fromkeys(("connect", "read", "write"), deadline)
        try:
            with self._pool.stream(
                "GET",
                url_of(target),
                headers=[
                    ("Host", target.host_header),
                    ("Accept", _ACCEPTED[modality]),
                    *_HEADERS,
                ],
                extensions={"timeout": {**deadlines, "pool": _left_s(deadline)}},
            ) as response:
                if response.status in _REDIRECTS:
                    return _location(response.headers)
                if response.status != 200:
                    raise InvalidMedia(
                        f"the {modality}'s server answered {response.status}", field=field
                    )
                return self._read(response.iter_stream(), field, modality)
        except AddressBlocked:
            raise MediaBlocked(
                f"the {modality}'s host is not on the internet", field=field
            ) from None
        except (
            OSError,
            ValueError,
            TimeoutError,
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
            httpcore2.TimeoutException,
        ):
            raise InvalidMedia(
                f"the {modality} could not be fetched in time", field=field
            ) from None

    def _read(self, chunks: Iterable[bytes], field: str, modality: Modality) -> bytes:
        limit = self._config.max_bytes[modality]
        body = bytearray()
        for chunk in chunks:
            body += chunk
            if len(body) > limit:
                raise MediaTooLarge(
                    f"the {modality} has more than the limit of {limit} bytes", field=field
                )
        return bytes(body)


class _GuardedBackend(httpcore2.NetworkBackend):
    """Network backend through which every connection is made, to a checked address.

    The backend and its streams read each `timeout` as a deadline of `time.monotonic()`, because a
    server that sends a byte now and then would stay within any timeout between two bytes.
    """

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        self._dial = httpcore2.SyncBackend()
        # The system's resolver takes no timeout and waits half a minute for a silent name server.
        self._resolvers = ThreadPoolExecutor(MAX_CONNECTIONS, "resolve")

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        resolving = self._resolvers.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in resolving.result(_left_s(timeout))]
        address = check_addresses(addresses, self._allowed)
        return _DeadlineStream(
            self._dial.connect_tcp(address, port, _left_s(timeout), local_address, socket_options)
        )


class _DeadlineStream(httpcore2.NetworkStream):
    def __init__(self, stream: httpcore2.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        secured = self._stream.start_tls(ssl_context, server_hostname, _left_s(timeout))
        return _DeadlineStream(secured)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left_s(deadline: float | None) -> float:
    """Raises TimeoutError when the deadline has passed."""
    assert deadline is not None, "every request has a deadline"
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _location(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name.lower() == b"location":
            return value.decode("ascii")  # raises ValueError for any other character
    raise ValueError("a redirect without a location")
