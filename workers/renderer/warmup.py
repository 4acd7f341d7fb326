"""Warm-up: one-time work of each path is done before the first request.

It renders real messages with real files, because most one-time work is not in the processor: image
plugins, the template's compilation, imports inside libraries. Nothing of it stays in a cache.
"""

import asyncio
import base64
import io
from collections.abc import Coroutine, Iterable, Iterator

from PIL import Image

from shared.codec import envelope
from shared.protocol.multimodal import IMAGE
from shared.protocol.renderer_rpc import RenderedPrompt
from shared.protocol.requests import (
    ImagePart,
    ImageURL,
    Message,
    Prompt,
    TextPart,
)
from workers.renderer.media.image_decoder import FORMATS
from workers.renderer.media.request_media import RequestMedia
from workers.renderer.preview_path import PreviewPath
from workers.renderer.processing.processor import Processor, Rendered
from workers.renderer.render_path import RenderPath

SIZE = (448, 448)
TTL_S = 60.0
MAX_BYTES = 2**30


async def warm_up_render_path(path: RenderPath, processor: Processor, media: RequestMedia) -> None:
    """Run before other requests; the path's image cache is empty again afterwards."""

    async def render(messages: list[Message]) -> None:
        _encode(await path.render(processor, Prompt(messages), media, TTL_S, None, []))

    try:
        await _run_at_once(render(messages) for messages in _conversations(processor))
    finally:
        path.images.clear()


async def warm_up_preview_path(path: PreviewPath, processor: Processor) -> None:
    async def render(messages: list[Message]) -> None:
        _encode(await path.render(processor, Prompt(messages), MAX_BYTES))

    await _run_at_once(render(messages) for messages in _conversations(processor))


async def _run_at_once(renderings: Iterable[Coroutine[None, None, None]]) -> None:
    """Use more than one thread, because threads have one-time work, too."""
    async with asyncio.TaskGroup() as group:
        for rendering in renderings:
            group.create_task(rendering)


def _conversations(processor: Processor) -> Iterator[list[Message]]:
    """Yield a text, and an image in each of the formats."""
    text = TextPart("What is it?")
    yield [Message("user", [text])]
    if processor.accepts(IMAGE):
        for name in FORMATS:
            yield [Message("user", [ImagePart(ImageURL(_noise(name))), text])]


def _noise(name: str) -> str:
    """Return the data: URL of an image of noise, which no cache has yet."""
    file = io.BytesIO()
    Image.effect_noise(SIZE, 64).convert("RGB").save(file, name)
    return "data:;base64," + base64.b64encode(file.getvalue()).decode()


def _encode(rendered: Rendered) -> None:
    envelope.encode(RenderedPrompt(rendered.prompt_token_ids, rendered.items), rendered.tensors)
