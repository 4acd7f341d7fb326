"""Item registry: maps the hashes that clients choose for their items to the stored bytes.

A client's hash is trusted only for that client: the same hash in another scope, or for another
model, is another item.
"""

from shared.bus.bus import Bus
from shared.bus.streams import MEDIA_REUSE_S
from shared.protocol import subjects
from shared.protocol.multimodal import content_hash, is_hash
from shared.protocol.requests import tenant_header


class ItemRegistry:
    def __init__(self, bus: Bus, scope: str, model: str, tenant: str = "") -> None:
        self._bus = bus
        self._tenant = tenant
        self._scope = scope
        self._model = model

    async def find(self, mm_hash: str) -> str | None:
        """Return the name of the item's bytes in `shared.state.media_store`. Raises Unavailable."""
        stored = await self._bus.read_last(subjects.MEDIA_STREAM, self._subject(mm_hash))
        name = "" if stored is None else stored.data.decode(errors="replace")
        return name if is_hash(name) else None

    async def note(self, mm_hash: str, name: str) -> None:
        """Make `find` return `name` for as long as the bytes are stored."""
        subject = self._subject(mm_hash)
        stored = await self._bus.read_last(subjects.MEDIA_STREAM, subject)
        recent_ms = self._bus.now_ms() - 1000 * MEDIA_REUSE_S
        if stored is None or stored.data != name.encode() or stored.stored_ms <= recent_ms:
            headers = tenant_header(self._tenant)
            await self._bus.publish_without_id(subject, name.encode(), headers)

    def _subject(self, mm_hash: str) -> str:
        return subjects.item(content_hash("item", self._scope, self._model, mm_hash))
