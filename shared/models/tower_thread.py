"""Thread of a tower: encodes items that may belong to different requests, batch by batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.helpers.batch_queue import BatchQueue
from shared.helpers.batch_thread import BatchThread, Pending
from shared.models.tower import Tower
from shared.models.tower_adapter import Fields


class TowerThread(BatchThread[Fields, Tensor]):
    """Queue of a tower, and the thread that computes its batches, on a GPU in a separate stream.

    A result is complete when it is returned: the check for finite values has waited for it.
    """

    def __init__(self, tower: Tower, max_batch_tokens: int) -> None:
        super().__init__("tower")
        self._tower = tower
        self._queue: BatchQueue[Pending[Fields, Tensor]] = BatchQueue(max_batch_tokens)
        device = tower.device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.num_encoded = 0
        """Number of items that have gone through the tower."""
        self.num_batches = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def encode(self, fields: Fields, turn: float = 0.0) -> Tensor:
        """Return the embeddings of an item, [num_embeds, width].

        Items of an earlier `turn` come first. Raises InvalidRequest for fields that the tower does
        not accept. Any other error in a batch is raised for the item that causes it.
        """
        self._tower.adapter.check(fields)
        pending: Pending[Fields, Tensor] = Pending(fields)
        self._queue.add(pending, self._tower.adapter.count(fields), turn)
        return await self._result_of(pending)

    def _take(self) -> list[Pending[Fields, Tensor]]:
        return self._queue.take()

    def _compute(self, items: Sequence[Fields]) -> list[Tensor]:
        self.num_encoded += len(items)
        self.num_batches += 1
        # Without a stream, this context does nothing.
        with torch.cuda.stream(self._stream):
            return self._tower.encode(items)
