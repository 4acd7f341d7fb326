"""Warm-up: one-time work of each path is done before the first request.

It renders real messages with real files, because most one-time work is not in the processor: image
plugins, the template's compilation, imports inside libraries. Nothing of it stays in a cache.
"""

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable, Iterator

from PIL import Image

from shared.codec import envelope
from shared.protocol.multimodal import IMAGE
from shared.protocol.renderer_rpc import RenderedPrompt
from shared.protocol.requests import ImagePart, ImageURL, Message, Prompt, TextPart
from workers.renderer.media.image_decoder import FORMATS
from workers.renderer.processing.processor import Processor, Rendered

SIZE = (448, 448)
TTL_S = 60.0
MAX_BYTES = 2**30


async def warm_up(processor: Processor, render: Callable[[Prompt], Awaitable[Rendered]]) -> None:
    """Render and encode prompts by `render`, before other requests."""

    async def encode(messages: list[Message]) -> None:
        rendered = await render(Prompt(messages))
        head = RenderedPrompt(rendered.prompt_token_ids, rendered.items)
        envelope.encode(head, rendered.tensors)

    # At once, to use more than one thread: threads have one-time work, too.
    async with asyncio.TaskGroup() as group:
        for messages in _conversations(processor):
            group.create_task(encode(messages))


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
