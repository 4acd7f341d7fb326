"""Render path: renders prompts and images for an engine, and caches processed images."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.config.schema import Config
from shared.errors import InvalidRequest
from shared.protocol.multimodal import DOCUMENT, BlobRef, PlaceholderRange
from shared.protocol.requests import Prompt
from shared.protocol.task_messages import TaskHeader
from workers.renderer.documents import DocumentExpander, Expansion
from workers.renderer.image_cache import ImageCache, PreparedImage
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.media.request_media import RequestMedia, Source
from workers.renderer.packing import Packer
from workers.renderer.processing import prompt as prompts
from workers.renderer.processing.processor import Processor, Rendered
from workers.renderer.threads import InThread


async def _nothing() -> None:
    pass


class RenderPath:
    def __init__(
        self,
        bus: Bus,
        blobs: Blobs,
        config: Config,
        decoders: MediaDecoders,
        in_thread: InThread,
        in_text_thread: InThread,
    ) -> None:
        self.images = ImageCache(blobs, decoders, in_thread)
        self._documents = DocumentExpander(decoders, config.renderer)
        self._packer = Packer(bus, blobs, config)
        self._in_text_thread = in_text_thread

    async def render(
        self,
        processor: Processor,
        prompt: Prompt,
        media: RequestMedia,
        ttl_s: float,
        header: TaskHeader | None,
        refs: list[BlobRef],
        begun: Callable[[], None] = lambda: None,
        advanced: Callable[[], Awaitable[None]] = _nothing,
    ) -> Rendered:
        """Return token ids, and items with their tensors or, for large tensors, references.

        The engine may fetch the referenced payloads for `ttl_s`. Without a `header`, no engine
        fetches them, and no task is published for encoders. `refs` has the references that the
        caller must release. `begun` is called in a thread when the work begins, and `advanced`
        after each document and each image. Raises a RequestError, or the errors of `media`.
        """
        ticket = None if header is None else header.ticket
        embeds = header is not None and header.embedding is not None
        lane = "interactive" if header is None else header.lane
        scope = "" if ticket is None else ticket.cache_scope
        read = partial(_read_document, media, advanced)
        expansion = await self._documents.expand(processor, prompt, read, scope, lane)
        prompt = expansion.prompt
        has_media = any(prompts.media_parts(prompt.messages))
        token_ids, ranges = await self._in_text_thread(
            _tokenize, begun, processor, prompt, has_media, embeds
        )
        is_item = prompt.token_ids is not None
        # Largest number of tokens of the next medium. The first one replaces its placeholder.
        room = processor.max_model_len - (not embeds) - len(token_ids) + 1
        prepared: list[PreparedImage] = []
        # Images are processed one at a time, and each is dropped after it: eight rasters of the
        # largest size would need a gigabyte.
        async for part, source in _sources(expansion, media):
            async with _keeping(media, source):
                image = await self.images.prepare(
                    processor, part, source.data, scope, ttl_s, room, is_item=is_item, lane=lane
                )
                prepared.append(image)
                room += 1 - image.num_tokens
                if image.ref is not None:
                    refs.append(image.ref)
            await advanced()
        if prompt.token_ids is None:
            await media.pin()
            if has_media:
                token_ids, ranges = await self._in_text_thread(
                    processor.expand, token_ids, prepared, prompts.field_of(prompt), embeds
                )
        else:
            _check_counts(prompt, ranges, prepared)
            await media.note(prompt.features)
        items, tensors = await self._packer.pack(header, prepared, ranges, refs)
        return Rendered(token_ids, items, tensors)


def _tokenize(
    begun: Callable[[], None], processor: Processor, prompt: Prompt, has_media: bool, embeds: bool
) -> tuple[list[int], list[PlaceholderRange]]:
    """Return the token ids of a prompt, and the ranges of its processed items.

    The ids have no room for media in messages yet. Without media, they are the whole prompt.
    """
    begun()
    token_ids = processor.tokenize(prompt)
    if prompt.token_ids is not None:
        return token_ids, processor.check_features(prompt, embeds)
    if has_media:
        return token_ids, []
    return processor.expand(token_ids, [], prompts.field_of(prompt), embeds)


async def _read_document(
    media: RequestMedia, advanced: Callable[[], Awaitable[None]], url: str, field: str
) -> bytes:
    """Return the file of a document, which is stored before."""
    source = await media.read(url, field, DOCUMENT)
    await media.keep(source)
    await advanced()
    return source.data


@asynccontextmanager
async def _keeping(media: RequestMedia, source: Source) -> AsyncIterator[None]:
    """Store the file during the block, and wait for the end of the storing."""
    keeping = asyncio.create_task(media.keep(source))
    try:
        yield
        await keeping
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _sources(
    expansion: Expansion, media: RequestMedia
) -> AsyncIterator[tuple[prompts.MediaPart, Source]]:
    """Yield files of media, or processed items. Each is read when the iteration reaches it."""
    prompt = expansion.prompt
    for part in prompts.media_parts(prompt.messages):
        if part.kind == DOCUMENT:
            yield part, Source(expansion.files[part.url])
        else:
            yield part, await media.read(part.url, part.field, part.kind)
    fields = prompts.feature_fields(prompt.features, "kwargs_data")
    for feature, field in zip(prompt.features, fields, strict=True):
        part = prompts.MediaPart(feature.modality, field, "")
        yield part, await media.read_item(feature, field)


def _check_counts(
    prompt: Prompt, ranges: Sequence[PlaceholderRange], prepared: Sequence[PreparedImage]
) -> None:
    """Raise InvalidRequest if an item's range has another number of placeholders than it needs."""
    fields = prompts.feature_fields(prompt.features, "mm_placeholders")
    for placeholder, image, field in zip(ranges, prepared, fields, strict=True):
        if placeholder.num_embeds != image.num_tokens:
            raise InvalidRequest(
                f"{image.modality} of {image.num_tokens} embeddings has a placeholder range"
                f" for {placeholder.num_embeds}",
                field=field,
            )
