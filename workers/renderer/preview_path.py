"""Preview path: prompts rendered for clients, without the caches of the render path.

The preview path neither reads these caches nor adds to them, so a client can neither detect the
media of other clients in them nor evict them.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from shared.bus.bus import Bus
from shared.codec import vllm_kwargs
from shared.codec.vllm_kwargs import Samples
from shared.config.schema import RendererConfig
from shared.errors import PayloadTooLarge, UnsupportedContent
from shared.models.media import DecodedAudio, DecodedMedia, SamplePlan
from shared.protocol.encoding import to_json
from shared.protocol.multimodal import DOCUMENT, FileKind, FrameSampling, PlaceholderRange
from shared.protocol.renderer_rpc import RenderedFeature, RenderedFeatures
from shared.protocol.requests import SEQUENCE_HEAD, Prompt
from shared.state.media_store import read_stored
from workers.renderer.documents import DocumentExpander, Expansion
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.media.loader import MediaLoader, is_stored
from workers.renderer.processing import prompt as prompts
from workers.renderer.processing.processor import ProcessedImage, Processor, Rendered, join
from workers.renderer.threads import InThread, Result


class PreviewPath:
    """Renders and tokenizes prompts without caches."""

    def __init__(
        self,
        bus: Bus,
        loader: MediaLoader,
        config: RendererConfig,
        decoders: MediaDecoders,
        in_thread: InThread,
    ) -> None:
        self._bus = bus
        self._loader = loader
        self._config = config
        self._decoders = decoders
        self._documents = DocumentExpander(decoders, config)
        self._in_thread = in_thread

    async def render(
        self, processor: Processor, prompt: Prompt, max_bytes: int, tenant: str = ""
    ) -> Rendered:
        """Render a prompt into items with all their tensors.

        Raises a RequestError: PayloadTooLarge as soon as the tensors exceed `max_bytes`.
        """
        expansion = await self._expand_documents(processor, prompt, tenant)
        token_ids = await self._tokenize(processor, expansion.prompt)
        images: list[ProcessedImage] = []
        budget = Budget(max_bytes)
        async for part, _, image in self._process_media(processor, expansion, tenant):
            budget.spend(sum(tensor.data.nbytes for tensor in image.fields.values()), part.field)
            images.append(image)
        token_ids, ranges = await self._expand(processor, prompt, token_ids, images)
        return join(token_ids, ranges, images)

    async def render_features(
        self,
        processor: Processor,
        prompt: Prompt,
        model_id: str,
        max_bytes: int,
        tenant: str = "",
        *,
        with_data: bool,
    ) -> RenderedFeatures:
        """Render a prompt for another server. `model_id` is the name of the model there.

        Raises the errors of `render`.
        """
        expansion = await self._expand_documents(processor, prompt, tenant)
        token_ids = await self._tokenize(processor, expansion.prompt)
        images: list[ProcessedImage] = []
        encoded: list[tuple[str, bytes | None, bytes | None]] = []
        budget = Budget(max_bytes)
        async for part, source, image in self._process_media(processor, expansion, tenant):
            mm_hash = await self._in_thread(
                vllm_kwargs.mm_hash, part.modality, source, model_id, image.video
            )
            kwargs_data = mm_metadata = None
            if with_data:
                kwargs_data, mm_metadata = await self._in_thread(processor.encode_item, image)
                budget.spend(len(kwargs_data) + len(mm_metadata or b""), part.field)
            encoded.append((mm_hash, kwargs_data, mm_metadata))
            images.append(replace(image, fields={}))
        token_ids, ranges = await self._expand(processor, prompt, token_ids, images)
        features = [
            RenderedFeature(image.modality, mm_hash, placeholder, *payload)
            for image, placeholder, (mm_hash, *payload) in zip(images, ranges, encoded, strict=True)
        ]
        return RenderedFeatures(token_ids, features)

    async def tokenize(self, processor: Processor, prompt: Prompt, tenant: str = "") -> list[int]:
        """Return token ids with room for the media, without a limit on their number.

        Raises a RequestError.
        """
        expansion = await self._expand_documents(processor, prompt, tenant)
        token_ids = await self._tokenize(processor, expansion.prompt)
        images = []
        async for part, data in self._files(expansion, tenant):
            measure = partial(self._open, processor.measure, part, data, tenant)
            images.append(await self._decoders.run(part.kind, measure))
        if prompt.text is None:
            token_ids, _ = await self._in_thread(processor.expand_unchecked, token_ids, images)
        return token_ids

    async def _expand_documents(
        self, processor: Processor, prompt: Prompt, tenant: str
    ) -> Expansion:
        async def read(url: str, field: str) -> bytes:
            return await self._read(url, field, DOCUMENT, tenant)

        return await self._documents.expand(processor, prompt, read, tenant)

    async def _tokenize(self, processor: Processor, prompt: Prompt) -> list[int]:
        if prompt.features:
            raise UnsupportedContent("the media in features are already rendered", field="features")
        return await self._in_thread(processor.tokenize, prompt)

    async def _expand(
        self,
        processor: Processor,
        prompt: Prompt,
        token_ids: list[int],
        images: list[ProcessedImage],
    ) -> tuple[list[int], list[PlaceholderRange]]:
        field = prompts.field_of(prompt)
        if prompt.token_ids is not None:
            processor.check_len(token_ids, field)
            return token_ids, []
        return await self._in_thread(processor.expand, token_ids, images, field)

    async def _process_media(
        self, processor: Processor, expansion: Expansion, tenant: str
    ) -> AsyncIterator[tuple[prompts.MediaPart, bytes | Samples, ProcessedImage]]:
        """Yield the media parts, the input of vLLM's mm_hash, and the processed media.

        The input of the hash is the samples of a sound, or else the file. Each medium is read when
        the previous one has been processed.
        """

        def process(
            media: DecodedMedia, field: str, sampling: FrameSampling
        ) -> tuple[ProcessedImage, Samples | None]:
            if not isinstance(media, DecodedAudio):
                return processor.process(media, field, "", sampling), None
            pieces: list[Samples] = []
            recorded = replace(media, read=partial(_record, media.read, pieces))
            sound = processor.process(recorded, field, "", sampling)
            return sound, np.concatenate(pieces)

        async for part, data in self._files(expansion, tenant):
            opened = partial(self._open, process, part, data, tenant)
            image, samples = await self._decoders.run(part.kind, opened)
            # For vLLM, the file of a JPEG sequence begins after the head of its URL.
            file = data.removeprefix(SEQUENCE_HEAD)
            if part.kind == DOCUMENT:
                # The pages of one file need different hashes.
                file = to_json(part.sampling.page) + file
            yield part, file if samples is None else samples, image

    async def _files(
        self, expansion: Expansion, tenant: str
    ) -> AsyncIterator[tuple[prompts.MediaPart, bytes]]:
        for part in prompts.media_parts(expansion.prompt.messages):
            if part.kind == DOCUMENT:
                yield part, expansion.files[part.url]
            else:
                yield part, await self._read(part.url, part.field, part.kind, tenant)

    async def _read(self, url: str, field: str, kind: FileKind, tenant: str) -> bytes:
        if is_stored(url):
            limit = self._config.max_bytes[kind]
            return await read_stored(self._bus, url, field, limit, tenant)
        return await self._loader.read(url, field, None, kind, tenant)

    def _open(
        self,
        work: Callable[[DecodedMedia, str, FrameSampling], Result],
        part: prompts.MediaPart,
        data: bytes,
        tenant: str,
    ) -> Result:
        opened = self._decoders.open(part.kind, data, part.field, tenant, part.sampling)
        with opened as media:
            return work(media, part.field, part.sampling)


def _record(
    read: Callable[[SamplePlan], Iterator[Samples]], pieces: list[Samples], plan: SamplePlan
) -> Iterator[Samples]:
    """Yield the pieces of a sound, and add them to `pieces`."""
    for piece in read(plan):
        pieces.append(piece)
        yield piece


class Budget:
    """Limit on the bytes of an answer."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def spend(self, num_bytes: int, field: str) -> None:
        """Count these bytes. Raises PayloadTooLarge."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            raise PayloadTooLarge(
                f"the media's tensors exceed the limit of {self._max_bytes} bytes of a message",
                field=field,
            )
