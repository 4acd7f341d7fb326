"""Warm-up: does the one-time work of each path before the first request.

Real messages with real files are rendered, because most one-time work is not in the processor:
image plugins, the template's compilation, imports inside libraries. The results are not cached.
"""

import asyncio
import base64
import io
import secrets
import wave
from collections.abc import Awaitable, Callable, Iterator

from PIL import Image

from shared.codec import envelope
from shared.decoding.image_reader import FORMATS
from shared.protocol.multimodal import AUDIO, IMAGE
from shared.protocol.renderer_rpc import RenderedPrompt
from shared.protocol.requests import (
    AudioPart,
    AudioURL,
    ImagePart,
    ImageURL,
    Message,
    Prompt,
    TextPart,
)
from workers.renderer.processing.processor import Processor, Rendered

SIZE = (448, 448)
HUM_RATE = 24_000
TTL_S = 60.0
MAX_BYTES = 2**30


async def warm_up(processor: Processor, render: Callable[[Prompt], Awaitable[Rendered]]) -> None:
    """Render and encode prompts by `render`, before other requests."""

    async def encode(messages: list[Message]) -> None:
        rendered = await render(Prompt(messages))
        head = RenderedPrompt(rendered.prompt_token_ids, rendered.items)
        envelope.encode(head, rendered.tensors)

    # Concurrently, to use more than one thread, because threads have one-time work too.
    async with asyncio.TaskGroup() as group:
        for messages in _conversations(processor):
            group.create_task(encode(messages))


def _conversations(processor: Processor) -> Iterator[list[Message]]:
    """Yield a text, an image in each of the formats, and a sound."""
    text = TextPart("What is it?")
    if not processor.needs_sound:
        yield [Message("user", [text])]
    if processor.accepts(IMAGE):
        for name in FORMATS:
            yield [Message("user", [ImagePart(ImageURL(_plain_image(name))), text])]
    if processor.accepts(AUDIO):
        yield [Message("user", [AudioPart(AudioURL(_hum())), text])]


def _plain_image(name: str) -> str:
    """Return the data: URL of an image with one random colour, which is not in any cache.

    Encoding noise in all formats would block the event loop for a tenth of a second.
    """
    file = io.BytesIO()
    red, green, blue = secrets.token_bytes(3)
    Image.new("RGB", SIZE, (red, green, blue)).save(file, name)
    return _url_of(file)


def _hum() -> str:
    """Return the data: URL of a second of sound, at a rate that must be resampled."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(HUM_RATE)
        sound.writeframes(bytes(range(64)) * (2 * HUM_RATE // 64))
    return _url_of(file)


def _url_of(file: io.BytesIO) -> str:
    return "data:;base64," + base64.b64encode(file.getvalue()).decode()
