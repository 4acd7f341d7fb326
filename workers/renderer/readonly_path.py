"""Rendering for somebody who only wants to see it: everything afresh, and nothing of it kept.

It neither looks into what the main path keeps nor adds to it, so whoever asks can neither learn
from it what others have sent nor push that out.
"""

from collections.abc import Sequence

from shared.bus import Bus
from shared.config import RendererConfig
from shared.errors import PayloadTooLarge
from shared.messages import Message
from workers.renderer import prompt
from workers.renderer.images import decode_image
from workers.renderer.jobmedia import read_stored
from workers.renderer.media import MediaLoader, is_stored
from workers.renderer.pictures import InThread
from workers.renderer.processor import Picture, Processor, Rendered, join


class ReadOnlyPath:
    def __init__(
        self, bus: Bus, loader: MediaLoader, config: RendererConfig, in_thread: InThread
    ) -> None:
        self._bus = bus
        self._loader = loader
        self._config = config
        self._in_thread = in_thread

    async def render(
        self, processor: Processor, messages: Sequence[Message], max_bytes: int
    ) -> Rendered:
        """Items with all their tensors.

        Raises a RequestError: PayloadTooLarge for tensors of more than `max_bytes`, as soon as
        there are so many.
        """
        token_ids = await self._in_thread(processor.tokenize, messages)
        pictures: list[Picture] = []
        num_bytes = 0
        for field, part in prompt.image_parts(messages):
            picture = await self._process(processor, part.image_url.url, field)
            num_bytes += sum(tensor.data.nbytes for tensor in picture.fields.values())
            if num_bytes > max_bytes:
                raise PayloadTooLarge(
                    f"the pictures' tensors have more than the {max_bytes} bytes of a message",
                    field=field,
                )
            pictures.append(picture)
        counts = [picture.num_tokens for picture in pictures]
        token_ids, ranges = await self._in_thread(processor.expand, token_ids, counts)
        return join(token_ids, ranges, pictures)

    async def tokenize(self, processor: Processor, messages: Sequence[Message]) -> list[int]:
        """Token ids with room for the pictures. Raises a RequestError, but not for their number."""
        token_ids = await self._in_thread(processor.tokenize, messages)
        counts = [
            (await self._process(processor, part.image_url.url, field)).num_tokens
            for field, part in prompt.image_parts(messages)
        ]
        token_ids, _ = await self._in_thread(processor.make_room, token_ids, counts)
        return token_ids

    async def tokenize_text(self, processor: Processor, text: str, field: str) -> list[int]:
        return await self._in_thread(processor.tokenize_text, text, field)

    async def _process(self, processor: Processor, url: str, field: str) -> Picture:
        if is_stored(url):
            data = await read_stored(self._bus, url, field, self._config.max_image_bytes)
        else:
            data = await self._in_thread(self._loader.read_afresh, url, field)

        def process() -> Picture:
            return processor.process(decode_image(data, self._config, field), field, "")

        return await self._in_thread(process)
