"""A task's items as the runner takes them: tensors from the message, from a blob, or embeddings."""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.codec.envelope import TensorData
from shared.errors import DecodeError, EncodingFailed, Overloaded, Unavailable
from shared.helpers.task_set import TaskSet
from shared.protocol.multimodal import MultiModalKwargsItem
from workers.engine.core.sequence import Item

if TYPE_CHECKING:  # an engine without a model of torch's, such as a test's, does not load it
    from torch import Tensor

    from shared.vision.embedding_store import EmbeddingStore, Held


@dataclass(slots=True, eq=False)
class ItemLoader:
    _blobs: Blobs
    _embeddings: "EmbeddingStore | None"
    """None where no worker makes any for others."""
    _restore: Callable[[TensorData], Any]
    """Makes of a tensor's bytes what the runner takes."""
    _reads_last: bool = True
    """Whether no worker behind this one needs the embeddings that encoders have made."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _sharing: TaskSet = field(default_factory=TaskSet)

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
        with contextlib.ExitStack() as views:
            if item.embedding is None:
                fields, blob = await mm_items.open_item(self._blobs, item, tensors)
                if blob is not None:
                    views.callback(blob.close)
                held = await self._find(item.mm_hash)
            elif self._embeddings is None:
                raise DecodeError("an item's embeddings are elsewhere, and nobody makes any")
            else:
                fields = mm_items.select_tensors(item.fields, tensors)
                held = await self._embeddings.wait(item.embedding, item.mm_hash, progress)
            if held is not None:
                views.callback(held.close)
            restored = {name: self._restore(tensor) for name, tensor in fields.items()}
            embedding = None if held is None else held.embedding
            opened = Item(item.modality, item.mm_hash, item.placeholder, restored, embedding)
            # The step thread may look at them longer than the request is in hand.
            close = views.pop_all().close
            weakref.finalize(opened, close_soon, self._loop, close).atexit = False
        if held is not None and self._embeddings is not None and self._reads_last:
            await self._embeddings.acknowledge(held)
        return opened

    async def _find(self, mm_hash: str) -> "Held | None":
        """What another engine has left for all."""
        if self._embeddings is None or not self._embeddings.shared:
            return None
        return await self._embeddings.get(self._embeddings.key_of(mm_hash), mm_hash)

    def share(self, mm_hash: str, embedding: "Tensor") -> None:
        """Leave for others what our tower has made. Called in the step thread; takes no time."""
        if self._embeddings is not None and self._embeddings.shared:
            self._loop.call_soon_threadsafe(self._start_sharing, mm_hash, embedding)

    def _start_sharing(self, mm_hash: str, embedding: "Tensor") -> None:
        self._sharing.start(self._share(mm_hash, embedding))

    async def _share(self, mm_hash: str, embedding: "Tensor") -> None:
        assert self._embeddings is not None
        # Without room, or without a broker, others will make their own.
        with contextlib.suppress(EncodingFailed, Overloaded, Unavailable):
            await self._embeddings.put(self._embeddings.key_of(mm_hash), mm_hash, embedding)


def close_soon(loop: asyncio.AbstractEventLoop, close: Callable[[], None]) -> None:
    """In whichever thread the last reference was given up."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and the process is about to
        loop.call_soon_threadsafe(close)
