"""Image cache: every image is processed once per machine while its result is stored.

The key of an image is the hash of its tenant, its file and the processor's settings. Results are
stored in the arena of this renderer or of another renderer on the machine. A repeated image is
therefore neither decoded nor processed, and the engine can already read its bytes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.codec.envelope import TensorData
from shared.errors import BlobLost, ContextTooLong, RequestError
from shared.protocol.multimodal import IMAGE, BlobRef, FileKind, Modality, Placement
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.media.image_decoder import hash_source
from workers.renderer.processing.processor import ProcessedImage, Processor
from workers.renderer.processing.prompt import MediaPart
from workers.renderer.threads import InThread


@dataclass(slots=True)
class CacheCounters:
    queries: int = 0
    hits: int = 0
    """Queries for images that were stored already."""
    processed: int = 0


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """A processed image, ready to be sent to the engine."""

    mm_hash: str
    num_tokens: int
    ref: BlobRef | None
    """None if the arena had no room for the image; `fields` then has all tensors."""
    fields: dict[str, TensorData]
    """Empty for an image from the cache."""
    metadata: dict[str, TensorData]
    """The fields that the language model needs."""
    modality: Modality = IMAGE
    placement: Placement | None = None


def copy_tensor(tensor: TensorData) -> TensorData:
    """Copy a tensor out of a blob that is about to be closed."""
    return replace(tensor, data=memoryview(bytes(tensor.data)))


class ImageCache:
    def __init__(self, blobs: Blobs, decoders: MediaDecoders, in_thread: InThread) -> None:
        self.counters = CacheCounters()
        self._blobs = blobs
        self._decoders = decoders
        self._in_thread = in_thread
        self._processing: dict[str, asyncio.Task[ProcessedImage]] = {}

    async def prepare(
        self,
        processor: Processor,
        part: MediaPart,
        data: bytes,
        tenant: str,
        ttl_s: float,
        max_tokens: int | None = None,
        *,
        is_item: bool = False,
        lane: str = "interactive",
    ) -> PreparedImage:
        """Prepare a file, or an item that another server has processed.

        The engine may read the result for `ttl_s`. Raises a RequestError naming the field, and
        ContextTooLong for a video or sound of more than `max_tokens`, before it is decoded.
        """
        modality, field = part.modality, part.field
        source_hash = await self._in_thread(hash_source, data)
        if is_item:
            mm_hash = processor.hash_item(modality, source_hash, tenant)
        else:
            mm_hash = processor.hash_media(modality, source_hash, tenant, part.sampling)

        def process() -> ProcessedImage:
            if is_item:
                return processor.decode_item(modality, data, mm_hash, field)
            with self._decoders.open(part.kind, data, field, tenant, part.sampling) as media:
                return processor.process(media, field, tenant, part.sampling, max_tokens)

        self.counters.queries += 1
        if (cached := await self._find(processor, modality, mm_hash, ttl_s)) is not None:
            self.counters.hits += 1
            return cached
        image = await self._process(mm_hash, part.kind, process, field, ttl_s, lane)
        ref = self._put(mm_hash, image, ttl_s)
        metadata = processor.metadata(modality, image.fields)
        return PreparedImage(
            mm_hash, image.num_tokens, ref, image.fields, metadata, modality, image.placement
        )

    def clear(self) -> None:
        """Remove all images, and reset the counters."""
        for task in self._processing.values():
            task.cancel()
        self._blobs.clear()
        self.counters.queries = self.counters.hits = self.counters.processed = 0

    async def _find(
        self, processor: Processor, modality: Modality, mm_hash: str, ttl_s: float
    ) -> PreparedImage | None:
        ref = await self._blobs.find(mm_hash, ttl_s)
        if ref is None:
            return None
        try:
            with await self._blobs.get(ref) as blob:
                fields, num_tokens = mm_items.read_item(blob)
                views = processor.metadata(modality, fields)
                metadata = {name: copy_tensor(tensor) for name, tensor in views.items()}
        except BaseException as error:
            await self._blobs.release(ref)
            if isinstance(error, BlobLost):
                return None
            raise
        placement = processor.place(modality, metadata)
        return PreparedImage(mm_hash, num_tokens, ref, {}, metadata, modality, placement)

    def _put(self, mm_hash: str, image: ProcessedImage, ttl_s: float) -> BlobRef | None:
        return mm_items.put_item(self._blobs, mm_hash, image.num_tokens, image.fields, ttl_s)

    async def _process(
        self,
        mm_hash: str,
        kind: FileKind,
        process: Callable[[], ProcessedImage],
        field: str,
        ttl_s: float,
        lane: str,
    ) -> ProcessedImage:
        """Process an image once for all requests that need it at the same time."""
        task = self._processing.get(mm_hash)
        is_own = task is None
        if task is None:

            async def run() -> ProcessedImage:
                image = await self._decoders.run(kind, process, lane)
                # The image is stored before the task ends, so that no request processes it again.
                if (ref := self._put(mm_hash, image, ttl_s)) is not None:
                    self._blobs.discard(ref)
                return image

            self.counters.processed += 1
            task = self._processing[mm_hash] = asyncio.create_task(run())
            task.add_done_callback(lambda _: self._processing.pop(mm_hash))
            # Retrieves the exception, because all requests that waited may have been cancelled.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            # A cancelled request does not cancel the task that other requests wait for.
            return await asyncio.shield(task)
        except RequestError as error:
            if isinstance(error, ContextTooLong) and not is_own:
                # The request that started the task had less room in its prompt.
                return await self._process(mm_hash, kind, process, field, ttl_s, lane)
            raise type(error)(error.message, field=field) from None
