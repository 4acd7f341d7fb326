"""Tower thread: turns the images of several requests into embeddings, batch by batch."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from shared.models.tower import Tower
from shared.models.tower_adapter import Fields
from workers.encoder.batches import BatchQueue


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    fields: Fields
    done: "asyncio.Future[Tensor]"


class TowerThread:
    def __init__(self, tower: Tower, max_batch_tokens: int) -> None:
        self._tower = tower
        self._queue: BatchQueue[_Pending] = BatchQueue(max_batch_tokens)
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "tower")
        self._began_s: float | None = None
        self.num_encoded = 0
        """Number of images that have gone through the tower."""
        self.num_batches = 0
        self.on_batch: Callable[[float], None] = lambda num_images: None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def batch_s(self) -> float:
        """Age of the current batch; 0 between batches."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    async def encode(self, fields: Fields) -> Tensor:
        """Return an image's embeddings, [num_tokens, width].

        Raises InvalidRequest for fields that the tower does not take. Any other error in a batch is
        raised for the image that causes it.
        """
        self._tower.adapter.check(fields)
        done: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._queue.add(_Pending(fields, done), self._tower.adapter.count(fields))
        self._arrived.set()
        return await done

    async def work(self) -> None:
        """Run batch after batch until cancelled."""
        while True:
            await self._arrived.wait()
            # No reference may outlive the batch: images are views of other workers' memory.
            await self._serve([image for image in self._queue.take() if not image.done.done()])
            if not len(self._queue):
                self._arrived.clear()

    async def _serve(self, batch: list[_Pending]) -> None:
        if not batch:
            return
        try:
            embeddings = await self._encode(batch)
        except Exception as error:
            if len(batch) > 1:
                for image in batch:
                    await self._serve([image])
            elif not batch[0].done.done():
                batch[0].done.set_exception(error)
            return
        for image, embedding in zip(batch, embeddings, strict=True):
            if not image.done.done():
                image.done.set_result(embedding)

    async def _encode(self, batch: list[_Pending]) -> list[Tensor]:
        self.num_encoded += len(batch)
        self.num_batches += 1
        self.on_batch(len(batch))
        self._began_s = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            fields = [image.fields for image in batch]
            return await loop.run_in_executor(self._thread, self._tower.encode, fields)
        finally:
            self._began_s = None

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._thread.shutdown(wait=False, cancel_futures=True)
