"""A task's items as the runner takes them: tensors from the message, from a blob, or embeddings."""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shared import parcels
from shared.blobs import Blobs
from shared.codec import TensorData
from shared.embeddings import Embeddings
from shared.errors import DecodeError
from shared.messages import EngineTask
from shared.multimodal import MultiModalKwargsItem
from shared.roads import Blob
from workers.engine.sequence import Item


class Opener:
    def __init__(
        self,
        blobs: Blobs,
        embeddings: Embeddings | None,
        restore: Callable[[TensorData], Any],
    ) -> None:
        """`restore` makes of a tensor's bytes what the runner takes; `embeddings` is None where no
        encoder works for the model."""
        self._blobs = blobs
        self._embeddings = embeddings
        self._restore = restore

    async def open(
        self,
        item: MultiModalKwargsItem,
        tensors: Sequence[TensorData],
        progress: Callable[[], Awaitable[None]],
    ) -> Item:
        """`progress` is called again and again while an encoder is still to make the embeddings;
        what it raises ends the waiting.

        Raises BlobLost when something must be made again, and what has kept an encoder from it.
        """
        if item.embedding is None:
            fields, blob = await parcels.open_item(self._blobs, item, tensors)
            return self._held(item, fields, blob)
        if self._embeddings is None:
            raise DecodeError("an item's embeddings are elsewhere, and nobody makes any")
        held = await self._embeddings.wait(item.embedding, item.mm_hash, progress)
        fields = parcels.named(item.fields, tensors)
        opened = self._held(item, fields, held.blob, held.embedding)
        await self._embeddings.acknowledge(held)
        return opened

    async def release(self, task: EngineTask) -> None:
        """Nobody will want the request's own payloads again."""
        for item in task.items:
            if item.blob is not None:
                await self._blobs.release(item.blob)

    def _held(
        self,
        item: MultiModalKwargsItem,
        fields: dict[str, TensorData],
        blob: Blob | None,
        embedding: Any = None,
    ) -> Item:
        restored = {name: self._restore(tensor) for name, tensor in fields.items()}
        opened = Item(item.modality, item.mm_hash, item.placeholder, restored, embedding)
        if blob is not None:
            # The step thread may look at it longer than the request is in hand.
            loop = asyncio.get_running_loop()
            weakref.finalize(opened, _close_soon, loop, blob).atexit = False
        return opened


def _close_soon(loop: asyncio.AbstractEventLoop, blob: Blob) -> None:
    """In whichever thread the last reference was given up."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and the process is about to
        loop.call_soon_threadsafe(blob.close)
