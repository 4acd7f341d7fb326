"""Pictures, each processed once on this machine for as long as its result is remembered.

A picture is known by the hash of its tenant, its file and the processor's settings. What has been
made of it is in an arena: ours, or that of another renderer of this machine. So one that comes
again is neither decoded nor processed, and its bytes are where the engine can have them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.codec.envelope import TensorData
from shared.config import RendererConfig
from shared.errors import BlobLost, RequestError
from shared.protocol.multimodal import IMAGE, BlobRef, Modality
from workers.renderer.media.image_decoder import decode_image, hash_source
from workers.renderer.processing.processor import ProcessedImage, Processor
from workers.renderer.threads import InThread


@dataclass(slots=True)
class CacheCounters:
    queries: int = 0
    """ImageCache asked for."""
    hits: int = 0
    """ImageCache that had been made before."""
    processed: int = 0


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """A picture on its way to the engine."""

    mm_hash: str
    num_tokens: int
    ref: BlobRef | None
    """None if there is no room for it in the arena; then `fields` has it all."""
    fields: dict[str, TensorData]
    """Empty for one that was made before."""
    metadata: dict[str, TensorData]
    """Of the fields, those that the language model needs."""
    modality: Modality = IMAGE


def copied(tensor: TensorData) -> TensorData:
    """Out of a blob that is about to be closed."""
    return replace(tensor, data=memoryview(bytes(tensor.data)))


class ImageCache:
    def __init__(self, blobs: Blobs, config: RendererConfig, in_thread: InThread) -> None:
        self.counters = CacheCounters()
        self._blobs = blobs
        self._config = config
        self._in_thread = in_thread
        self._making: dict[str, asyncio.Task[ProcessedImage]] = {}

    async def prepare(
        self, processor: Processor, data: bytes, field: str, tenant: str, ttl_s: float
    ) -> PreparedImage:
        """`data` is the picture's file, `ttl_s` how long the engine may ask for what is made of it.

        Raises a RequestError naming `field`.
        """
        mm_hash = processor.hash_picture(await self._in_thread(hash_source, data), tenant)

        def process() -> ProcessedImage:
            return processor.process(decode_image(data, self._config, field), field, tenant)

        return await self._prepare(processor, mm_hash, process, field, ttl_s)

    async def prepare_item(
        self, processor: Processor, data: bytes, field: str, tenant: str, ttl_s: float
    ) -> PreparedImage:
        """Like `prepare`, of a picture that another server has processed: `data` is its item."""
        mm_hash = processor.hash_item(await self._in_thread(hash_source, data), tenant)

        def take() -> ProcessedImage:
            return processor.take_item(data, mm_hash, field)

        return await self._prepare(processor, mm_hash, take, field, ttl_s)

    async def _prepare(
        self,
        processor: Processor,
        mm_hash: str,
        process: Callable[[], ProcessedImage],
        field: str,
        ttl_s: float,
    ) -> PreparedImage:
        self.counters.queries += 1
        if (known := await self._find(processor, mm_hash, ttl_s)) is not None:
            self.counters.hits += 1
            return known
        picture = await self._make(mm_hash, process, field, ttl_s)
        ref = self._put(mm_hash, picture, ttl_s)
        metadata = {name: picture.fields[name] for name in processor.metadata}
        return PreparedImage(mm_hash, picture.num_tokens, ref, picture.fields, metadata)

    def clear(self) -> None:
        """Forget everything, and that it ever was."""
        for making in self._making.values():
            making.cancel()
        self._blobs.clear()
        self.counters.queries = self.counters.hits = self.counters.processed = 0

    async def _find(self, processor: Processor, mm_hash: str, ttl_s: float) -> PreparedImage | None:
        ref = await self._blobs.find(mm_hash, ttl_s)
        if ref is None:
            return None
        try:
            with await self._blobs.get(ref) as blob:
                fields, num_tokens = mm_items.read_item(blob)
                metadata = {name: copied(fields[name]) for name in processor.metadata}
        except BaseException as error:
            await self._blobs.release(ref)
            if isinstance(error, BlobLost):
                return None
            raise
        return PreparedImage(mm_hash, num_tokens, ref, {}, metadata)

    def _put(self, mm_hash: str, picture: ProcessedImage, ttl_s: float) -> BlobRef | None:
        return mm_items.put_item(self._blobs, mm_hash, picture.num_tokens, picture.fields, ttl_s)

    async def _make(
        self, mm_hash: str, process: Callable[[], ProcessedImage], field: str, ttl_s: float
    ) -> ProcessedImage:
        """Those who want the same picture at the same time wait for the first."""
        making = self._making.get(mm_hash)
        if making is None:

            async def make() -> ProcessedImage:
                picture = await self._in_thread(process)
                # It is there before this is over: who came between would make it again.
                if (ref := self._put(mm_hash, picture, ttl_s)) is not None:
                    self._blobs.discard(ref)
                return picture

            self.counters.processed += 1
            making = self._making[mm_hash] = asyncio.create_task(make())
            making.add_done_callback(lambda _: self._making.pop(mm_hash))
        try:
            # Whoever gives up does not take it from the others.
            return await asyncio.shield(making)
        except RequestError as error:
            raise type(error)(error.message, field=field) from None
