"""Parts of a model that paints, as its stage uses them: the encoder of texts, and the decoder.

Either part may be in the same process, or in a separate stage: see `image_items`.
"""

import asyncio
import io
from collections.abc import Callable
from typing import NamedTuple, Protocol

from PIL import Image

from shared.bus.bus import Bus
from shared.codec.envelope import TensorData
from shared.protocol.task_messages import TaskHeader
from shared.state import media_store
from workers.generator.core.denoising import Condition, Pixels, Size
from workers.generator.image_thread import Encode, ImageThread


class Caller(NamedTuple):
    """Request, or item task, that uses a part."""

    header: TaskHeader
    tenant: str
    due_s: float
    """Urgency, as in the units of the thread."""
    check: Callable[[], None]
    """Called repeatedly during a wait for another stage. It may raise to end the wait."""


class Texts(Protocol):
    """Encoder of texts."""

    async def encode(self, caller: Caller, encode: Encode) -> list[Condition]:
        """Return the encoded texts. Raises RequestEnded."""


class Files(Protocol):
    """Decoder of latents, which stores files."""

    async def store(
        self, caller: Caller, number: int, latents: TensorData, size: Size, fps: int | None
    ) -> str:
        """Store the image or the video of latents, and return its `media:` URL.

        `number` is the number of the image in its request. Raises RequestEnded.
        """


class ThreadTexts:
    """Encoder of texts in the thread of this process."""

    def __init__(self, thread: ImageThread) -> None:
        self._thread = thread

    async def encode(self, caller: Caller, encode: Encode) -> list[Condition]:
        return await self._thread.encode(caller.header.request_id, encode, caller.due_s)


class ThreadFiles:
    """Decoder of latents in the thread of this process."""

    def __init__(self, bus: Bus, thread: ImageThread) -> None:
        self._bus, self._thread = bus, thread

    async def store(
        self, caller: Caller, number: int, latents: TensorData, size: Size, fps: int | None
    ) -> str:
        pixels = await self._thread.decode(
            caller.header.request_id, number, latents, size, caller.due_s
        )
        data = await asyncio.to_thread(_to_file, pixels, fps)
        return await media_store.store_url(self._bus, data, caller.tenant)


def _to_file(pixels: Pixels, fps: int | None) -> bytes:
    if fps is None:
        return to_png(pixels)
    # Without videos, PyAV need not be installed.
    from workers.generator.video_file import to_mp4

    return to_mp4(pixels, fps)


def to_png(pixels: Pixels) -> bytes:
    """Return the PNG file of an image: the same bytes for the same pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
