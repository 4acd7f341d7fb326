"""Tower thread: turns the images of several requests into embeddings, batch by batch."""

from collections.abc import Sequence

from torch import Tensor

from shared.helpers.batch_thread import BatchThread, Pending
from shared.models.tower import Tower
from shared.models.tower_adapter import Fields
from workers.encoder.batches import BatchQueue


class TowerThread(BatchThread[Fields, Tensor]):
    def __init__(self, tower: Tower, max_batch_tokens: int) -> None:
        super().__init__("tower")
        self._tower = tower
        self._queue: BatchQueue[Pending[Fields, Tensor]] = BatchQueue(max_batch_tokens)
        self.num_encoded = 0
        """Number of images that have gone through the tower."""
        self.num_batches = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def encode(self, fields: Fields) -> Tensor:
        """Return an image's embeddings, [num_tokens, width].

        Raises InvalidRequest for fields that the tower does not accept. Any other error in a batch
        is raised for the image that causes it.
        """
        self._tower.adapter.check(fields)
        pending: Pending[Fields, Tensor] = Pending(fields)
        self._queue.add(pending, self._tower.adapter.count(fields))
        return await self._result_of(pending)

    def _take(self) -> list[Pending[Fields, Tensor]]:
        return self._queue.take()

    def _compute(self, items: Sequence[Fields]) -> list[Tensor]:
        self.num_encoded += len(items)
        self.num_batches += 1
        return self._tower.encode(items)
