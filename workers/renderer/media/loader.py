"""Media loader: reads the file behind a content part's URL, from the request or the internet.

Fetched bytes are cached by tenant and URL. While one thread fetches a URL, other threads that need
it for the same tenant wait for that fetch. All functions block and are thread-safe.
"""

import threading
from concurrent.futures import Future

from shared.config import RendererConfig
from shared.errors import InvalidMedia, RequestError
from shared.lru import ByteLRU
from workers.renderer.media.fetcher import Fetcher
from workers.renderer.media.image_decoder import decode_data_url

_Key = tuple[str, str]
"""Tenant and URL."""


def is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def is_stored(url: str) -> bool:
    """Return whether a URL names a file in the broker's own store."""
    return url.startswith("media:")


class MediaLoader:
    def __init__(self, config: RendererConfig) -> None:
        """Raises ValueError for a network in the configuration that is none."""
        self._config = config
        self._fetcher = Fetcher(config)
        self._lock = threading.Lock()
        self._fetched: ByteLRU[_Key, bytes] = ByteLRU(config.url_cache_mib * 2**20)
        self._flights: dict[_Key, Future[bytes]] = {}

    def read(self, url: str, field: str, tenant: str | None) -> bytes:
        """Return the bytes behind `url`. Raises a RequestError that names `field`.

        Without a tenant, the cache is neither used nor changed.
        """
        if not is_remote(url):
            if url[:5].lower() != "data:":
                raise InvalidMedia(
                    "an image's URL must begin with data:, media:, http: or https:", field=field
                )
            return decode_data_url(url, self._config, field)
        if tenant is None:
            return self._fetcher.fetch(url, field)
        key = (tenant, url)
        with self._lock:
            if (cached := self._fetched.get(key)) is not None:
                return cached
            flight = self._flights.get(key)
            is_own = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if is_own:
            self._fetch(key, field, flight)
        try:
            return flight.result()
        except RequestError as error:
            # The error of another thread's flight names another request's field.
            raise type(error)(error.message, field=field) from None

    def recall(self, url: str, tenant: str) -> bytes | None:
        """Return the cached bytes of this URL, if any; does not block."""
        with self._lock:
            return self._fetched.get((tenant, url))

    def remember(self, url: str, data: bytes, tenant: str) -> None:
        """Add bytes from another source to the cache."""
        with self._lock:
            self._fetched.put((tenant, url), data, len(data))

    def _fetch(self, key: _Key, field: str, flight: "Future[bytes]") -> None:
        """Fetch a URL and complete its flight."""
        try:
            data = self._fetcher.fetch(key[1], field)
            flight.set_result(data)
        except BaseException as error:
            flight.set_exception(error)
        with self._lock:
            del self._flights[key]
            if flight.exception() is None:
                self._fetched.put(key, data, len(data))
