"""Pictures, each processed once on this machine for as long as its result is remembered.

A picture is known by the hash of its file and of the processor's settings. What has been made of
it is in an arena: ours, or that of another renderer of this machine. So one that comes again is
neither decoded nor processed, and its bytes are where the engine can have them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from shared import parcels
from shared.blobs import Blobs
from shared.codec import TensorData
from shared.config import RendererConfig
from shared.errors import BlobLost, RequestError
from shared.multimodal import BlobRef
from workers.renderer.images import decode_image, hash_source
from workers.renderer.media import MediaLoader
from workers.renderer.processor import Picture, Processor

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


@dataclass(slots=True)
class Counters:
    hits: int = 0
    """Pictures that had been made before."""
    processed: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A picture on its way to the engine."""

    mm_hash: str
    num_tokens: int
    ref: BlobRef | None
    """None if there is no room for it in the arena; then `fields` has it all."""
    fields: dict[str, TensorData]
    """Empty for one that was made before."""


class InThread(Protocol):
    """Runs a function that blocks."""

    async def __call__(self, function: Callable[[*Args], Result], *args: *Args) -> Result: ...


class Pictures:
    def __init__(
        self, blobs: Blobs, media: MediaLoader, config: RendererConfig, in_thread: InThread
    ) -> None:
        self.counters = Counters()
        self._blobs = blobs
        self._media = media
        self._config = config
        self._in_thread = in_thread
        self._making: dict[str, asyncio.Task[Picture]] = {}

    async def prepare(self, processor: Processor, url: str, field: str, ttl_s: float) -> Prepared:
        """`ttl_s` is how long the engine may ask for it. Raises a RequestError naming `field`."""
        data = await self._in_thread(self._media.read, url, field)
        mm_hash = processor.hash_picture(await self._in_thread(hash_source, data))
        if (known := await self._find(mm_hash, ttl_s)) is not None:
            self.counters.hits += 1
            return known
        picture = await self._make(processor, mm_hash, data, field)
        ref = parcels.put(self._blobs, mm_hash, picture.num_tokens, picture.fields, ttl_s)
        return Prepared(mm_hash, picture.num_tokens, ref, picture.fields)

    async def _find(self, mm_hash: str, ttl_s: float) -> Prepared | None:
        ref = await self._blobs.find(mm_hash, ttl_s)
        if ref is None:
            return None
        try:
            with await self._blobs.get(ref) as blob:
                _, num_tokens = parcels.read(blob)
        except BaseException as error:
            await self._blobs.release(ref)
            if isinstance(error, BlobLost):
                return None
            raise
        return Prepared(mm_hash, num_tokens, ref, {})

    async def _make(self, processor: Processor, mm_hash: str, data: bytes, field: str) -> Picture:
        """Those who want the same picture at the same time wait for the first."""
        making = self._making.get(mm_hash)
        if making is None:

            def make() -> Picture:
                return processor.process(decode_image(data, self._config, field), field)

            self.counters.processed += 1
            making = self._making[mm_hash] = asyncio.ensure_future(self._in_thread(make))
            making.add_done_callback(lambda _: self._making.pop(mm_hash))
        try:
            # Whoever gives up does not take it from the others.
            return await asyncio.shield(making)
        except RequestError as error:
            raise type(error)(error.message, field=field) from None
