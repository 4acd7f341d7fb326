"""From a content part's URL to a picture: from the request itself, or from the internet, once.

Fetched bytes are kept for a while by tenant and URL, and while one thread fetches a URL all others
of that tenant that want it wait for that. All functions block, and may be called from many threads.
"""

import threading
from concurrent.futures import Future

from shared.config import RendererConfig
from shared.errors import InvalidMedia, RequestError
from shared.lru import ByteLRU
from shared.models.media import DecodedImage
from workers.renderer.media.fetcher import Fetcher
from workers.renderer.media.image_decoder import decode_data_url, decode_image

_Key = tuple[str, str]
"""Tenant and URL."""


def is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def is_stored(url: str) -> bool:
    """Whether it names a picture in the broker's own store."""
    return url.startswith("media:")


class MediaLoader:
    def __init__(self, config: RendererConfig) -> None:
        """Raises ValueError for a network in the configuration that is none."""
        self._config = config
        self._fetcher = Fetcher(config)
        self._lock = threading.Lock()
        self._fetched: ByteLRU[_Key, bytes] = ByteLRU(config.url_cache_mib * 2**20)
        self._flights: dict[_Key, Future[bytes]] = {}

    def load(self, url: str, field: str, tenant: str = "") -> DecodedImage:
        """Raises a RequestError that names `field`."""
        return decode_image(self.read(url, field, tenant), self._config, field)

    def read(self, url: str, field: str, tenant: str) -> bytes:
        """The bytes behind `url`, whatever they are. Raises a RequestError that names `field`."""
        if not self._is_elsewhere(url, field):
            return decode_data_url(url, self._config, field)
        key = (tenant, url)
        with self._lock:
            if (kept := self._fetched.get(key)) is not None:
                return kept
            flight = self._flights.get(key)
            if flight is None:
                ours = self._flights[key] = Future()
        if flight is None:
            return self._fetch(key, field, ours)
        try:
            return flight.result()
        except RequestError as error:
            # The same answer, to another request's field.
            raise type(error)(error.message, field=field) from None

    def read_afresh(self, url: str, field: str) -> bytes:
        """Like `read`, but from the source itself; what is kept is neither used nor changed."""
        if not self._is_elsewhere(url, field):
            return decode_data_url(url, self._config, field)
        return self._fetcher.fetch(url, field)

    @staticmethod
    def _is_elsewhere(url: str, field: str) -> bool:
        """False for a picture in the URL itself."""
        if not is_remote(url) and url[:5].lower() != "data:":
            raise InvalidMedia(
                "a picture's URL must begin with data:, media:, http: or https:", field=field
            )
        return is_remote(url)

    def recall(self, url: str, tenant: str) -> bytes | None:
        """What is kept by this URL; does not block."""
        with self._lock:
            return self._fetched.get((tenant, url))

    def remember(self, url: str, data: bytes, tenant: str) -> None:
        """Keep what somebody else has fetched."""
        with self._lock:
            self._fetched.put((tenant, url), data, len(data))

    def _fetch(self, key: _Key, field: str, flight: "Future[bytes]") -> bytes:
        _, url = key
        try:
            data = self._fetcher.fetch(url, field)
        except BaseException as error:
            self._land(key)
            flight.set_exception(error)
            raise
        self._land(key, data)
        flight.set_result(data)
        return data

    def _land(self, key: _Key, data: bytes | None = None) -> None:
        with self._lock:
            del self._flights[key]
            if data is not None:
                self._fetched.put(key, data, len(data))
