"""Request media: the files of one request, byte for byte the same on every attempt.

A URL may serve other bytes, or none, at the time of a retry. Fetched files are therefore stored by
content hash, and the request's pin records the hash for each of its URLs. The pin is appended only
if it does not exist yet: of two workers with the same request, only one forwards it with the files
that it has fetched.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog

from shared.bus.bus import Bus
from shared.config.schema import RendererConfig
from shared.errors import Fenced, MediaNotFound, MMCacheMiss
from shared.protocol import subjects
from shared.protocol.encoding import to_msgpack
from shared.protocol.messages import MediaPin, PinnedPart
from shared.protocol.multimodal import FileKind
from shared.protocol.requests import Feature, tenant_header
from shared.state import media_store
from workers.renderer.media.item_registry import ItemRegistry
from workers.renderer.media.loader import MediaLoader, is_remote, is_stored

_log = structlog.get_logger()
_pin = msgspec.msgpack.Decoder(MediaPin)


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes of a media file."""

    data: bytes
    name: str | None = None
    """Name under which the file must be stored; None for a file that a retry can read again."""


class RequestMedia:
    """Reads, stores and pins the media files of one request."""

    def __init__(
        self,
        bus: Bus,
        loader: MediaLoader,
        config: RendererConfig,
        request_id: str,
        request_sequence: int,
        tenant: str = "",
        scope: str = "",
        model: str = "",
    ) -> None:
        """`request_sequence` is the request's sequence in its stream, `scope` the caches' scope."""
        self._bus = bus
        self._loader = loader
        self._config = config
        self._request_id = request_id
        self._tenant = tenant
        self._scope = scope
        self._subject = subjects.pin(request_id, request_sequence)
        self._items = ItemRegistry(bus, scope, model, tenant)
        self._pinned: list[PinnedPart] = []
        self._sequence = 0
        """Sequence of the pin in its subject; 0 if there is none."""
        self._fetched: list[PinnedPart] = []

    async def recall(self) -> None:
        """Read the pin of an earlier attempt. Raises Unavailable."""
        stored = await self._bus.read_last(subjects.MEDIA_STREAM, self._subject)
        if stored is not None:
            self._pinned = _pin.decode(stored.data).parts
            self._sequence = stored.sequence

    async def read(self, url: str, field: str, kind: FileKind) -> Source:
        """Return the file at the URL of the next part.

        Raises a RequestError that names `field`, or Unavailable.
        """
        if is_stored(url):
            return await self._read_stored(url, field, kind)
        if is_remote(url):
            return await self._read_remote(url, field, kind)
        return Source(await self._loader.read(url, field, self._scope, kind, self._tenant))

    async def read_item(self, feature: Feature, field: str) -> Source:
        """Return the bytes of an item. Raises a RequestError that names `field`, or Unavailable."""
        if feature.data is not None:
            return await self._read_stored(feature.data, field, feature.modality)
        name = await self._items.find(feature.mm_hash)
        if name is None:
            raise _miss(field)
        try:
            return await self._read_stored(media_store.media_url(name), field, feature.modality)
        except MediaNotFound:
            raise _miss(field) from None

    async def note(self, features: Sequence[Feature]) -> None:
        """Register the items under their hashes. Raises Unavailable."""
        for feature in features:
            name = None if feature.data is None else media_store.parse_media_url(feature.data)
            if name is not None:
                await self._items.note(feature.mm_hash, name)

    async def keep(self, source: Source) -> None:
        """Store a fetched file if it is not stored yet. Raises Unavailable."""
        if source.name is not None:
            await media_store.store(self._bus, source.name, source.data, self._tenant)

    async def pin(self) -> None:
        """Record the files of all parts, which have been read and stored, for later attempts.

        Raises Fenced if another worker has pinned other files in the meantime, or Unavailable.
        """
        if self._fetched == self._pinned:
            return
        data = to_msgpack(MediaPin(self._fetched))
        try:
            headers = tenant_header(self._tenant)
            await self._bus.append(self._subject, data, self._sequence, headers=headers)
        except Fenced:
            # The append may have succeeded, with a lost ack. Its repetition is then refused.
            stored = await self._bus.read_last(subjects.MEDIA_STREAM, self._subject)
            if stored is None or stored.data != data:
                raise

    async def _read_remote(self, url: str, field: str, kind: FileKind) -> Source:
        url_hash = hashlib.sha256(url.encode()).hexdigest()
        if (pinned := self._pinned_part(url_hash)) is not None:
            limit = self._config.max_bytes[kind]
            data = await media_store.find(self._bus, pinned.media, limit, self._tenant)
            if data is not None:
                self._fetched.append(pinned)
                return Source(data)
            _log.warning("pinned_media_lost", request_id=self._request_id, media=pinned.media)
        data = await self._loader.read(url, field, self._scope, kind, self._tenant)
        name = await media_store.hash_media(data)
        self._fetched.append(PinnedPart(url_hash, name))
        return Source(data, name)

    def _pinned_part(self, url_hash: str) -> PinnedPart | None:
        number = len(self._fetched)
        part = self._pinned[number] if number < len(self._pinned) else None
        return part if part is not None and part.url_hash == url_hash else None

    async def _read_stored(self, url: str, field: str, kind: FileKind) -> Source:
        name = media_store.parse_media_url(url)
        data = self._loader.recall(url, self._scope, kind)
        # A file may have been removed since it was read.
        if data is None or name is None or not await self._is_stored(name):
            limit = self._config.max_bytes[kind]
            data = await media_store.read_stored(self._bus, url, field, limit, self._tenant)
            self._loader.remember(url, data, self._scope, kind)
        return Source(data, name)

    async def _is_stored(self, name: str) -> bool:
        return await media_store.look_up(self._bus, name, self._tenant) is not None


def _miss(field: str) -> MMCacheMiss:
    return MMCacheMiss("no item with this hash is stored here: send its data", field=field)
