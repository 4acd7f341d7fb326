"""Vocoder thread: computes the chunks of several requests, batch by batch."""

from collections.abc import Sequence

from shared.batch_thread import BatchThread, Pending
from shared.stage.inputs import RequestEnded
from workers.generator.core.schedule import Window
from workers.generator.core.units import Unit, UnitQueue
from workers.generator.core.vocoder import Codes, Samples, Vocoder, cut

Item = tuple[Codes, Window]
"""All frames of a request so far, and the window of its next chunk."""


class VocoderThread(BatchThread[Item, Samples]):
    def __init__(self, vocoder: Vocoder, max_batch: int) -> None:
        super().__init__("vocoder")
        self._vocoder = vocoder
        self._queue: UnitQueue[Pending[Item, Samples]] = UnitQueue(max_batch)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def speak(
        self, request_id: str, codes: Codes, window: Window, dry_at_s: float
    ) -> Samples:
        """Return the samples of a chunk; `codes` are all frames of its request so far.

        Raises RequestEnded after `cancel`, and any error of the vocoder for the chunk that causes
        it alone.
        """
        pending: Pending[Item, Samples] = Pending((codes, window))
        self._queue.add(Unit(request_id, window.shape, dry_at_s, pending))
        try:
            return await self._result_of(pending)
        finally:
            self._queue.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Do not compute the chunk of this request that waits, if there is one."""
        unit = self._queue.cancel(request_id)
        if unit is not None and not unit.work.done.done():
            unit.work.done.set_exception(RequestEnded())

    def _take(self) -> list[Pending[Item, Samples]]:
        return [unit.work for unit in self._queue.take()]

    def _compute(self, items: Sequence[Item]) -> list[Samples]:
        chunks = [cut(self._vocoder, codes, window) for codes, window in items]
        return self._vocoder.synthesize(chunks)
