"""What the first request of each path would be the first to run, run before it comes.

Real requests with real files, because most of what happens once is not in the processor: image
plugins, the template's compilation, imports inside of libraries. Nothing of it is kept.
"""

import asyncio
import base64
import io
from collections.abc import Coroutine, Iterable, Iterator

from PIL import Image

from shared.codec import envelope
from shared.protocol.messages import ImagePart, ImageURL, Message, Prompt, TextPart
from shared.protocol.renderer_rpc import RenderedPrompt
from workers.renderer.media.image_decoder import FORMATS
from workers.renderer.media.request_media import RequestMedia
from workers.renderer.preview_path import PreviewPath
from workers.renderer.processing.processor import Processor, Rendered
from workers.renderer.render_path import RenderPath

SIZE = (448, 448)
TTL_S = 60.0
MAX_BYTES = 2**30


async def main_path(path: RenderPath, processor: Processor, media: RequestMedia) -> None:
    """Before anything else is in its cache, which is empty again afterwards."""

    async def render(messages: list[Message]) -> None:
        _encode(await path.render(processor, Prompt(messages), media, TTL_S, None, []))

    try:
        await _at_once(render(messages) for messages in _conversations(processor))
    finally:
        path.pictures.clear()


async def readonly_path(path: PreviewPath, processor: Processor) -> None:
    async def render(messages: list[Message]) -> None:
        _encode(await path.render(processor, Prompt(messages), MAX_BYTES))

    await _at_once(render(messages) for messages in _conversations(processor))


async def _at_once(renderings: Iterable[Coroutine[None, None, None]]) -> None:
    """So that there is work for more than one thread: they have a first time, too."""
    async with asyncio.TaskGroup() as group:
        for rendering in renderings:
            group.create_task(rendering)


def _conversations(processor: Processor) -> Iterator[list[Message]]:
    """A text, and a picture in each of the formats."""
    text = TextPart("What is it?")
    yield [Message("user", [text])]
    if processor.takes_pictures:
        for name in FORMATS:
            yield [Message("user", [ImagePart(ImageURL(_picture(name))), text])]


def _picture(name: str) -> str:
    """Of noise, so that nobody has made it before."""
    file = io.BytesIO()
    Image.effect_noise(SIZE, 64).convert("RGB").save(file, name)
    return "data:;base64," + base64.b64encode(file.getvalue()).decode()


def _encode(rendered: Rendered) -> None:
    envelope.encode(RenderedPrompt(rendered.prompt_token_ids, rendered.items), rendered.tensors)
