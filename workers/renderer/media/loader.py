"""Media loader: reads the file behind a content part's URL, from the request or the internet.

Fetched bytes are cached by tenant and URL, with room of its own for each modality, so that a video
evicts no images. While one thread fetches a URL, other threads that need it for the same tenant and
modality wait for that fetch. All functions block and are thread-safe.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future

from shared.config_renderer import RendererConfig
from shared.errors import InvalidMedia, RequestError
from shared.lru import ByteLRU
from shared.protocol.multimodal import IMAGE, Modality
from workers.renderer.media.fetcher import Fetcher
from workers.renderer.media.image_decoder import decode_data_url

_Key = tuple[Modality, str, str]
"""Modality, tenant and URL. The limit on a file's size depends on the first."""


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
        self._fetched: Mapping[Modality, ByteLRU[_Key, bytes]] = {
            modality: ByteLRU(config.url_cache_mib * 2**20) for modality in config.max_bytes
        }
        self._flights: dict[_Key, Future[bytes]] = {}

    def read(self, url: str, field: str, tenant: str | None, modality: Modality = IMAGE) -> bytes:
        """Return the bytes behind `url`. Raises a RequestError that names `field`.

        Without a tenant, the cache is neither used nor changed.
        """
        if not is_remote(url):
            if url[:5].lower() != "data:":
                raise InvalidMedia(
                    "a media URL must begin with data:, media:, http: or https:", field=field
                )
            return decode_data_url(url, self._config, field, modality)
        if tenant is None:
            return self._fetcher.fetch(url, field, modality)
        key = (modality, tenant, url)
        with self._lock:
            if (cached := self._fetched[modality].get(key)) is not None:
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

    def recall(self, url: str, tenant: str, modality: Modality) -> bytes | None:
        """Return the cached bytes of this URL, if any; does not block."""
        with self._lock:
            return self._fetched[modality].get((modality, tenant, url))

    def remember(self, url: str, data: bytes, tenant: str, modality: Modality) -> None:
        """Add bytes from another source to the cache."""
        with self._lock:
            self._fetched[modality].put((modality, tenant, url), data, len(data))

    def _fetch(self, key: _Key, field: str, flight: "Future[bytes]") -> None:
        """Fetch a URL and complete its flight."""
        modality, _, url = key
        try:
            data = self._fetcher.fetch(url, field, modality)
            flight.set_result(data)
        except BaseException as error:
            flight.set_exception(error)
        with self._lock:
            del self._flights[key]
            if flight.exception() is None:
                self._fetched[modality].put(key, data, len(data))
