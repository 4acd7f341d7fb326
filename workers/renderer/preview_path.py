"""Rendering for somebody who only wants to see it: everything afresh, and nothing of it kept.

It neither looks into what the main path keeps nor adds to it, so whoever asks can neither learn
from it what others have sent nor push that out.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

from shared.bus.bus import Bus
from shared.codec import vllm_kwargs
from shared.config import RendererConfig
from shared.errors import PayloadTooLarge, UnsupportedContent
from shared.protocol.messages import Prompt
from shared.protocol.multimodal import IMAGE, PlaceholderRange
from shared.protocol.renderer_rpc import RenderedFeature, RenderedFeatures
from workers.renderer.media.image_decoder import decode_image
from workers.renderer.media.loader import MediaLoader, is_stored
from workers.renderer.media.request_media import read_stored
from workers.renderer.processing import prompt
from workers.renderer.processing.processor import ProcessedImage, Processor, Rendered, join
from workers.renderer.threads import InThread


class PreviewPath:
    def __init__(
        self, bus: Bus, loader: MediaLoader, config: RendererConfig, in_thread: InThread
    ) -> None:
        self._bus = bus
        self._loader = loader
        self._config = config
        self._in_thread = in_thread

    async def render(
        self, processor: Processor, asked: Prompt, max_bytes: int, tenant: str = ""
    ) -> Rendered:
        """Items with all their tensors.

        Raises a RequestError: PayloadTooLarge for tensors of more than `max_bytes`, as soon as
        there are so many.
        """
        token_ids = await self._tokenize(processor, asked)
        pictures: list[ProcessedImage] = []
        budget = Budget(max_bytes)
        async for field, data in self._files(asked, tenant):
            picture = await self._process(processor, data, field)
            budget.spend(sum(tensor.data.nbytes for tensor in picture.fields.values()), field)
            pictures.append(picture)
        token_ids, ranges = await self._expand(processor, asked, token_ids, pictures)
        return join(token_ids, ranges, pictures)

    async def render_features(
        self,
        processor: Processor,
        asked: Prompt,
        model_id: str,
        max_bytes: int,
        tenant: str = "",
        *,
        with_data: bool,
    ) -> RenderedFeatures:
        """The same for another server, which knows the model as `model_id`.

        Raises what `render` raises.
        """
        token_ids = await self._tokenize(processor, asked)
        pictures: list[ProcessedImage] = []
        found: list[tuple[str, bytes | None, bytes | None]] = []
        budget = Budget(max_bytes)
        async for field, data in self._files(asked, tenant):
            picture = await self._process(processor, data, field)
            mm_hash = await self._in_thread(vllm_kwargs.mm_hash, picture.modality, data, model_id)
            kwargs_data = mm_metadata = None
            if with_data:
                kwargs_data, mm_metadata = await self._in_thread(processor.give_item, picture)
                budget.spend(len(kwargs_data) + len(mm_metadata), field)
            found.append((mm_hash, kwargs_data, mm_metadata))
            pictures.append(replace(picture, fields={}))
        token_ids, ranges = await self._expand(processor, asked, token_ids, pictures)
        features = [
            RenderedFeature(IMAGE, mm_hash, placeholder, kwargs_data, mm_metadata)
            for placeholder, (mm_hash, kwargs_data, mm_metadata) in zip(ranges, found, strict=True)
        ]
        return RenderedFeatures(token_ids, features)

    async def tokenize(self, processor: Processor, asked: Prompt, tenant: str = "") -> list[int]:
        """Token ids with room for the pictures. Raises a RequestError, but not for their number."""
        token_ids = await self._tokenize(processor, asked)
        counts = [
            (await self._process(processor, data, field)).num_tokens
            async for field, data in self._files(asked, tenant)
        ]
        if asked.text is None:
            token_ids, _ = await self._in_thread(processor.make_room, token_ids, counts)
        return token_ids

    async def _tokenize(self, processor: Processor, asked: Prompt) -> list[int]:
        if asked.features:
            raise UnsupportedContent("these pictures are rendered already", field="features")
        return await self._in_thread(processor.tokenize, asked)

    async def _expand(
        self,
        processor: Processor,
        asked: Prompt,
        token_ids: list[int],
        pictures: list[ProcessedImage],
    ) -> tuple[list[int], list[PlaceholderRange]]:
        field = prompt.field_of(asked)
        if asked.token_ids is not None:
            processor.check_len(token_ids, field)
            return token_ids, []
        counts = [picture.num_tokens for picture in pictures]
        return await self._in_thread(processor.expand, token_ids, counts, field)

    async def _files(self, asked: Prompt, tenant: str) -> AsyncIterator[tuple[str, bytes]]:
        """The pictures' files, each read when its turn comes, with their fields."""
        for field, part in prompt.image_parts(asked.messages):
            url = part.image_url.url
            if is_stored(url):
                limit = self._config.max_image_bytes
                yield field, await read_stored(self._bus, url, field, limit, tenant)
            else:
                yield field, await self._in_thread(self._loader.read_afresh, url, field)

    async def _process(self, processor: Processor, data: bytes, field: str) -> ProcessedImage:
        def process() -> ProcessedImage:
            return processor.process(decode_image(data, self._config, field), field, "")

        return await self._in_thread(process)


class Budget:
    """What fits into an answer."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def spend(self, num_bytes: int, field: str) -> None:
        """Raises PayloadTooLarge."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            raise PayloadTooLarge(
                f"the pictures' tensors have more than the {self._max_bytes} bytes of a message",
                field=field,
            )
