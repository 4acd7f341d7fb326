"""Encoding of items in a tower thread, while the step thread continues with other requests."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from shared.models.tower import Tower
from shared.models.tower_thread import TowerThread
from workers.engine.core.batch_lane import DELAY_S
from workers.engine.core.sequence import EngineRequest, Item

OnEncoded = Callable[[str, Tensor], None]
"""Called with the hash of an item that the tower has encoded, and its embedding, [num_embeds,
width]."""


@dataclass(slots=True, eq=False)
class _Encoding:
    """An item in the tower's queue or in its batch, and the requests that wait for it."""

    task: "asyncio.Task[None]"
    request_ids: set[str] = field(default_factory=set)


class ItemEncoder:
    """Encodes each awaited item once, and reports it for all requests that wait for it.

    `start` and `forget` are called in the step thread. Everything else belongs to the event loop.
    """

    def __init__(self, tower: Tower, max_batch_tokens: int, on_encoded: OnEncoded | None) -> None:
        self.thread = TowerThread(tower, max_batch_tokens)
        self.on_result: Callable[[str, str, Tensor | Exception], object] = lambda *result: None
        """Called with the request's id, the item's hash, and the embedding or the error."""
        self._on_encoded = on_encoded
        self._loop = asyncio.get_running_loop()
        self._encodings: dict[str, _Encoding] = {}
        """By the item's hash."""

    def start(self, request: EngineRequest, item: Item) -> None:
        """Encode an item of a request. Items of the batch lane wait as its sequences do."""
        turn = time.monotonic() + (DELAY_S if request.lane == "batch" else 0.0)
        self._schedule(partial(self._start, request.request_id, item, turn))

    def forget(self, request_id: str) -> None:
        """Report no more items of a request that has ended, and encode none for it alone."""
        self._schedule(partial(self._forget, request_id))

    def _schedule(self, action: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the process is ending
            self._loop.call_soon_threadsafe(action)

    def _start(self, request_id: str, item: Item, turn: float) -> None:
        encoding = self._encodings.get(item.mm_hash)
        if encoding is None:
            encoding = _Encoding(self._loop.create_task(self._encode(item, turn)))
            self._encodings[item.mm_hash] = encoding
        encoding.request_ids.add(request_id)

    def _forget(self, request_id: str) -> None:
        for mm_hash, encoding in [*self._encodings.items()]:
            encoding.request_ids.discard(request_id)
            if not encoding.request_ids:
                encoding.task.cancel()
                del self._encodings[mm_hash]

    async def _encode(self, item: Item, turn: float) -> None:
        result: Tensor | Exception
        try:
            result = await self.thread.encode(item.fields, turn)
        except Exception as error:
            result = error
        else:
            if self._on_encoded is not None:
                self._on_encoded(item.mm_hash, result)
        for request_id in self._encodings.pop(item.mm_hash).request_ids:
            self.on_result(request_id, item.mm_hash, result)
