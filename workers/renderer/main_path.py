"""Rendering for an engine that will use it: what has been made of a picture is kept, and found."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from shared.blobs import Blobs
from shared.bus import Bus
from shared.config import Config
from shared.messages import Message, RenderTask
from workers.renderer import prompt
from workers.renderer.jobmedia import JobMedia
from workers.renderer.packing import Packer
from workers.renderer.pictures import InThread, Pictures, Prepared
from workers.renderer.processor import Processor, Rendered


async def _nothing() -> None:
    pass


class MainPath:
    def __init__(self, bus: Bus, blobs: Blobs, config: Config, in_thread: InThread) -> None:
        self.pictures = Pictures(blobs, config.renderer, in_thread)
        self._packer = Packer(bus, blobs, config)
        self._in_thread = in_thread

    async def render(
        self,
        processor: Processor,
        messages: Sequence[Message],
        media: JobMedia,
        ttl_s: float,
        task: RenderTask | None = None,
        begun: Callable[[], None] = lambda: None,
        advanced: Callable[[], Awaitable[None]] = _nothing,
    ) -> Rendered:
        """Items hold their tensors if these are small together, and references to them if not.

        `ttl_s` is how long the engine may ask for them; without a `task` no engine will. `begun` is
        called, in a thread, when there is one for this work, and `advanced` after each picture.

        Raises a RequestError, or whatever `media` raises.
        """

        def begin() -> list[int]:
            begun()
            return processor.tokenize(messages)

        tenant = "" if task is None else task.accepted.tenant
        token_ids = await self._in_thread(begin)
        prepared: list[Prepared] = []
        try:
            # One at a time, and dropped once it is processed: eight rasters of the largest size
            # would be a gigabyte.
            for field, part in prompt.image_parts(messages):
                source = await media.read(part.image_url.url, field)
                picture, _ = await asyncio.gather(
                    self.pictures.prepare(processor, source.data, field, tenant, ttl_s),
                    media.keep(source),
                )
                prepared.append(picture)
                await advanced()
            await media.pin()
            counts = [picture.num_tokens for picture in prepared]
            token_ids, ranges = await self._in_thread(processor.expand, token_ids, counts)
        except Exception:
            # Nobody will ask for them, so the arena need not keep them to the deadline.
            await self.pictures.release(prepared)
            raise
        items, tensors = await self._packer.pack(task, prepared, ranges)
        return Rendered(token_ids, items, tensors)
