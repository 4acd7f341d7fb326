"""Media loader: reads the file at a content part's URL, from the request or the internet.

Fetched bytes are cached by scope and URL, with a separate cache for each kind of file, so that a
video evicts no images. While one request fetches a URL, other requests with the same scope and kind
wait for that fetch.
"""

import asyncio
from collections.abc import Mapping

from shared.config.schema import RendererConfig
from shared.errors import InvalidMedia, RequestError
from shared.helpers.lru import ByteLRU
from shared.protocol.multimodal import IMAGE, FileKind
from workers.renderer.media.fetcher import Fetcher
from workers.renderer.media.image_decoder import decode_data_url
from workers.renderer.threads import InThread

_Key = tuple[FileKind, str, str]
"""Kind of the file, scope of caches and URL. The limit on a file's size depends on the first."""


def is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def is_stored(url: str) -> bool:
    """Return whether a URL names a file in the broker's store."""
    return url.startswith("media:")


class MediaLoader:
    """Reads and caches media files. Belongs to one event loop."""

    def __init__(self, config: RendererConfig, in_thread: InThread) -> None:
        """Raises ValueError for an invalid network in the configuration."""
        self._config = config
        self._in_thread = in_thread
        self._fetcher = Fetcher(config)
        self._fetched: Mapping[FileKind, ByteLRU[_Key, bytes]] = {
            kind: ByteLRU(config.url_cache_mib * 2**20) for kind in config.max_bytes
        }
        self._flights: dict[_Key, asyncio.Task[bytes]] = {}

    async def read(
        self,
        url: str,
        field: str,
        scope: str | None,
        kind: FileKind = IMAGE,
        tenant: str = "",
    ) -> bytes:
        """Return the file at `url`. Raises a RequestError that names `field`, or Overloaded.

        Without a scope of caches, the cache is neither used nor changed.
        """
        if not is_remote(url):
            if url[:5].lower() != "data:":
                raise InvalidMedia(
                    "a media URL must begin with data:, media:, http: or https:", field=field
                )
            return await self._in_thread(decode_data_url, url, self._config, field, kind)
        if scope is None:
            return await self._fetcher.fetch(url, field, kind, tenant)
        key = (kind, scope, url)
        if (cached := self._fetched[kind].get(key)) is not None:
            return cached
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(self._fetch(key, field, tenant))
            # Retrieves the exception, because all requests that waited may have been cancelled.
            flight.add_done_callback(lambda flight: flight.exception())
        try:
            # When this request is cancelled, the fetch continues for others and for the cache.
            return await asyncio.shield(flight)
        except RequestError as error:
            # The error of another request's flight names that request's field.
            raise type(error)(error.message, field=field) from None

    def recall(self, url: str, scope: str, kind: FileKind) -> bytes | None:
        """Return the cached bytes of this URL, if any."""
        return self._fetched[kind].get((kind, scope, url))

    def remember(self, url: str, data: bytes, scope: str, kind: FileKind) -> None:
        """Add bytes from another source to the cache."""
        self._fetched[kind].put((kind, scope, url), data, len(data))

    async def close(self) -> None:
        await self._fetcher.close()

    async def _fetch(self, key: _Key, field: str, tenant: str) -> bytes:
        kind, _, url = key
        try:
            data = await self._fetcher.fetch(url, field, kind, tenant)
            self._fetched[kind].put(key, data, len(data))
            return data
        finally:
            del self._flights[key]
