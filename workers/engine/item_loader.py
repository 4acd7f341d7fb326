"""Loads a task's items for the runner: tensors from the message or a blob, and embeddings."""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.codec.envelope import TensorData
from shared.errors import DecodeError, EncodingFailed, Overloaded, Unavailable
from shared.helpers.task_set import TaskSet
from shared.protocol.multimodal import MultiModalKwargsItem
from workers.engine.core.sequence import Item

if TYPE_CHECKING:  # tests run engines without torch
    from torch import Tensor

    from shared.vision.embedding_store import EmbeddingStore, Held


class ItemLoader:
    """Loads the items of tasks, and shares embeddings with other engines. Belongs to one loop."""

    def __init__(
        self,
        blobs: Blobs,
        embeddings: "EmbeddingStore | None",
        restore: Callable[[TensorData], Any],
        reads_last: bool = True,
        attended: bool = False,
    ) -> None:
        """`restore` converts a tensor's bytes to the runner's type of tensors.

        For `attended` see `Item`.

        `embeddings` is None if no worker makes embeddings for others. If this worker `reads_last`,
        no later worker needs the embeddings of encoders, and they may be deleted.
        """
        self._blobs = blobs
        self._embeddings = embeddings
        self._restore = restore
        self._reads_last = reads_last
        self._attended = attended
        self._loop = asyncio.get_running_loop()
        self._sharing = TaskSet()

    async def open(
        self,
        item: MultiModalKwargsItem,
        tensors: Sequence[TensorData],
        progress: Callable[[], Awaitable[None]],
        *,
        reads_last: bool = True,
    ) -> Item:
        """Return the item with its tensors and, if there is one, its embedding.

        `progress` is called repeatedly while an encoder computes the embedding; an exception that
        it raises ends the wait. `reads_last` is as for the constructor. Raises BlobLost if the item
        must be rendered or encoded again, and the encoder's error if it could not encode the item.
        """
        with contextlib.ExitStack() as views:
            if item.embedding is None:
                fields, blob = await mm_items.open_item(self._blobs, item, tensors)
                if blob is not None:
                    views.callback(blob.close)
                held = await self._find(item.mm_hash)
            elif self._embeddings is None:
                raise DecodeError(
                    "this item needs embeddings from an encoder, and no encoder is configured for"
                    " the model"
                )
            else:
                fields = mm_items.select_tensors(item.fields, tensors)
                held = await self._embeddings.wait(item.embedding, item.mm_hash, progress)
            if held is not None:
                views.callback(held.close)
            restored = {name: self._restore(tensor) for name, tensor in fields.items()}
            embedding = None if held is None else held.embedding
            opened = Item(
                item.modality,
                item.mm_hash,
                item.placeholder,
                restored,
                embedding,
                self._attended,
            )
            # The step thread may read them after the request has ended.
            close = views.pop_all().close
            weakref.finalize(opened, close_soon, self._loop, close).atexit = False
        is_last = self._reads_last and reads_last
        if held is not None and self._embeddings is not None and is_last:
            await self._embeddings.acknowledge(held)
        return opened

    async def _find(self, mm_hash: str) -> "Held | None":
        """Return the embedding that another engine has shared, or None."""
        if self._embeddings is None or not self._embeddings.shared:
            return None
        return await self._embeddings.get(self._embeddings.key_of(mm_hash), mm_hash)

    def share(self, mm_hash: str, embedding: "Tensor") -> None:
        """Store an embedding for other engines. Called in the step thread; does not block."""
        if self._embeddings is not None and self._embeddings.shared:
            self._loop.call_soon_threadsafe(self._start_sharing, mm_hash, embedding)

    def _start_sharing(self, mm_hash: str, embedding: "Tensor") -> None:
        self._sharing.start(self._share(mm_hash, embedding))

    async def _share(self, mm_hash: str, embedding: "Tensor") -> None:
        assert self._embeddings is not None
        # Without room or without a broker, the other engines compute it themselves.
        with contextlib.suppress(EncodingFailed, Overloaded, Unavailable):
            await self._embeddings.put(self._embeddings.key_of(mm_hash), mm_hash, embedding)


def close_soon(loop: asyncio.AbstractEventLoop, close: Callable[[], None]) -> None:
    """Schedule `close` on the loop, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, and the process is ending
        loop.call_soon_threadsafe(close)
