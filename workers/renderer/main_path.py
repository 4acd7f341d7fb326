"""Rendering for an engine that will use it: what has been made of a picture is kept, and found."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from shared import parcels
from shared.blobs import Blobs
from shared.codec import TensorData
from shared.config import Config
from shared.messages import Message
from shared.multimodal import BlobRef, MultiModalKwargsItem, PlaceholderRange
from workers.renderer import prompt
from workers.renderer.jobmedia import JobMedia
from workers.renderer.pictures import InThread, Pictures, Prepared
from workers.renderer.processor import Processor, Rendered


async def _nothing() -> None:
    pass


class MainPath:
    def __init__(self, blobs: Blobs, config: Config, in_thread: InThread) -> None:
        self.pictures = Pictures(blobs, config.renderer, in_thread)
        self._blobs = blobs
        self._inline_bytes = config.blobs.inline_kib * 2**10
        self._in_thread = in_thread

    async def render(
        self,
        processor: Processor,
        messages: Sequence[Message],
        media: JobMedia,
        ttl_s: float,
        begun: Callable[[], None] = lambda: None,
        advanced: Callable[[], Awaitable[None]] = _nothing,
    ) -> Rendered:
        """Items hold their tensors if these are small together, and references to them if not.

        `ttl_s` is how long the engine may ask for them. `begun` is called, in a thread, when there
        is one for this work, and `advanced` after each picture. Raises a RequestError, or
        whatever `media` raises.
        """

        def begin() -> list[int]:
            begun()
            return processor.tokenize(messages)

        token_ids = await self._in_thread(begin)
        prepared = []
        # One at a time, and dropped once it is processed: eight rasters of the largest size would
        # be a gigabyte.
        for field, part in prompt.image_parts(messages):
            source = await media.read(part.image_url.url, field)
            picture, _ = await asyncio.gather(
                self.pictures.prepare(processor, source.data, field, ttl_s), media.keep(source)
            )
            prepared.append(picture)
            await advanced()
        await media.pin()
        counts = [picture.num_tokens for picture in prepared]
        token_ids, ranges = await self._in_thread(processor.expand, token_ids, counts)
        items, tensors = await self._pack(prepared, ranges)
        return Rendered(token_ids, items, tensors)

    async def _pack(
        self, prepared: Sequence[Prepared], ranges: Sequence[PlaceholderRange]
    ) -> tuple[list[MultiModalKwargsItem], list[TensorData]]:
        """Large pictures stay where they are, small ones go into the message."""
        items: list[MultiModalKwargsItem] = []
        tensors: list[TensorData] = []
        num_bytes = sum(p.ref.num_bytes for p in prepared if p.ref is not None)
        inline = num_bytes <= self._inline_bytes
        for picture, placeholder in zip(prepared, ranges, strict=True):
            ref, fields = picture.ref, picture.fields
            if ref is not None and inline:
                fields = fields or await self._copy(ref)
                await self._blobs.release(ref)
                ref = None
            if ref is not None:
                item = MultiModalKwargsItem("image", picture.mm_hash, placeholder, blob=ref)
            else:
                indexes = {name: len(tensors) + i for i, name in enumerate(fields)}
                item = MultiModalKwargsItem("image", picture.mm_hash, placeholder, indexes)
                tensors += fields.values()
            items.append(item)
        return items, tensors

    async def _copy(self, ref: BlobRef) -> dict[str, TensorData]:
        with await self._blobs.get(ref) as blob:
            fields, _ = parcels.read(blob)
            return {
                name: replace(tensor, data=memoryview(bytes(tensor.data)))
                for name, tensor in fields.items()
            }
