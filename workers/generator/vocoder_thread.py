"""Vocoder thread: computes the chunks of several requests, batch by batch."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shared.stage.inputs import RequestEnded
from workers.generator.core.schedule import Window
from workers.generator.core.units import Unit, UnitQueue
from workers.generator.core.vocoder import Codes, Samples, Vocoder, cut


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    codes: Codes
    window: Window
    done: "asyncio.Future[Samples]"


class VocoderThread:
    def __init__(self, vocoder: Vocoder, max_batch: int) -> None:
        self._vocoder = vocoder
        self._queue: UnitQueue[_Pending] = UnitQueue(max_batch)
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "vocoder")
        self._began_s: float | None = None
        self.on_batch: Callable[[float], None] = lambda num_chunks: None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def batch_s(self) -> float:
        """Age of the current batch; 0 between batches."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    async def speak(
        self, request_id: str, codes: Codes, window: Window, dry_at_s: float
    ) -> Samples:
        """Return the samples of a chunk; `codes` are all frames of its request so far.

        Raises RequestEnded after `cancel`, and any error of the vocoder for the chunk that causes
        it alone.
        """
        done: asyncio.Future[Samples] = asyncio.get_running_loop().create_future()
        self._queue.add(Unit(request_id, window.shape, dry_at_s, _Pending(codes, window, done)))
        self._arrived.set()
        try:
            return await done
        finally:
            self._queue.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Do not compute the chunk of this request that waits, if there is one."""
        unit = self._queue.cancel(request_id)
        if unit is not None and not unit.work.done.done():
            unit.work.done.set_exception(RequestEnded())

    async def work(self) -> None:
        """Compute batch after batch until cancelled."""
        while True:
            await self._arrived.wait()
            await self._serve([unit.work for unit in self._queue.take()])
            if not len(self._queue):
                self._arrived.clear()

    async def _serve(self, batch: Sequence[_Pending]) -> None:
        try:
            made = await self._compute(batch)
        except Exception as error:
            if len(batch) > 1:
                for pending in batch:
                    await self._serve([pending])
            elif batch and not batch[0].done.done():
                batch[0].done.set_exception(error)
            return
        for pending, samples in zip(batch, made, strict=True):
            if not pending.done.done():
                pending.done.set_result(samples)

    async def _compute(self, batch: Sequence[_Pending]) -> list[Samples]:
        if not batch:
            return []
        self.on_batch(len(batch))
        self._began_s = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._synthesize, batch
            )
        finally:
            self._began_s = None

    def _synthesize(self, batch: Sequence[_Pending]) -> list[Samples]:
        chunks = [cut(self._vocoder, pending.codes, pending.window) for pending in batch]
        return self._vocoder.synthesize(chunks)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._thread.shutdown(wait=False, cancel_futures=True)
